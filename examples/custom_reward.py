"""A reward of your own, for ppo_vl.py and rloo.py, in the protocol of TRL:

    python ppo_vl.py --rewards accuracy examples/custom_reward.py:short_and_right --reward-weights 1 1

The function is called once per rollout on each rank with keywords: `prompts`, `completions` (the response alone; strings where
the dataset's prompt is a string, lists with one assistant message where it is a chat), `completion_ids`, `answer`, every
column of the dataset, each a list with one entry per response, and `trainer_state`, `log_metric`, `log_extra`. It returns
one value per response: a number, None (does not apply: the response is judged by the other rewards alone) or, as here, a
dict of named components, which are added up and logged one by one as reward/<name>. It must take **kwargs; it may be async.
"""


def short_and_right(
    completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns
) -> list[dict]:
    return [
        {"mentions_answer": float(right.lower() in text.lower()), "brevity": -0.01 * len(ids)}
        for text, ids, right in zip(completions, completion_ids, answer)
    ]
