"""A reward of your own for ppo_vl.py: python ppo_vl.py --reward-fn examples/custom_reward.py:short_and_right

The function is called once per rollout batch with keywords: `prompts`, `completions` (response text only, never the prompt),
`completion_ids`, `answer`, `label`, and every column of the dataset, each a list with one entry per response. It returns one
value per response: a number, None (does not apply: the response is judged by the other rewards alone) or, as here, a dict of
named components, which are added up and logged one by one as reward/<name>.
"""


def short_and_right(completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns) -> list[dict]:
    return [
        {"mentions_answer": float(right.lower() in text.lower()), "brevity": -0.01 * len(ids)}
        for text, ids, right in zip(completions, completion_ids, answer)
    ]
