"""A reward of your own, for rloo.py and ppo_vl.py, in the protocol of TRL:

    python rloo.py --rewards accuracy examples/custom_reward.py:short_and_right --reward-weights 1 1

The function is called once per rollout on each rank with keywords: `prompts`, `completions` (the response
alone; strings where the dataset's prompt is a string, lists with one assistant message where it is a chat),
`completion_ids`, every column of the dataset, each a list with one entry per response, `trainer_state` and
`log_metric`; and `texts`, always strings. It returns one value per response: a number, or None (does not
apply: the response is judged by the other rewards alone). It must take **kwargs; it may be async.
"""


def short_and_right(
    texts: list[str], completion_ids: list[list[int]], answer: list[str], log_metric, **columns
) -> list[float]:
    mentioned = [float(right.lower() in text.lower()) for text, right in zip(texts, answer)]
    log_metric("reward/mentions_answer", sum(mentioned) / len(mentioned))
    return [score - 0.01 * len(ids) for score, ids in zip(mentioned, completion_ids)]
