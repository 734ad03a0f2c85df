"""Prefix-shared packing: every prompt and picture once, no padding, exact log-probs and gradients.

A *group* is one prompt with its G responses. A *pack* is one row of tokens,

    [prompt 0][response 0.0][response 0.1]...[prompt 1][response 1.0]...

in which a response attends to [its prompt; itself] and nothing else, and its positions
continue from its prompt's. The result is that of one row per response, up to the order of
summation, for about 1/G of the work.

    for pack in packs_of_rank(groups, prompts, encode, responses, max_tokens, rank, world_size, packed):
        new_logprobs, entropy = response_logprobs(model, pack, temperature)      # (M,) each
        logprobs = pack.tokens(table)                                            # (B, R) -> (M,)
        advantages = pack.responses(vector)                                      # (B,) -> (S,)
        table[pack.token_index] = new_logprobs                                   # back into a (B, R) table

Not every model can do this. `enable_packing_if_exact` compares with the unmodified model
before a run trusts packing; where they differ, everything takes the *plain path*
(packed=False): one response at a time, with all of the processor's own inputs, through
model.forward and model.generate: exact for any model, but slow.

Letters: N tokens, S responses and M response tokens in a pack, B responses in a rollout, P
prompt length, R response length, H hidden, V vocab.
"""

import functools
import hashlib
import inspect
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from common.attention import CannotPack, ModelMask, is_packed, make_layout, switch_attention

__all__ = ["is_packed", "switch_attention"]  # for the scripts
ENCODERS = {"image": "get_image_features", "video": "get_video_features"}  # what these take is media
KEPT_LOGPROBS = 2**26  # log-probs kept from forward to backward: 256 MB that save computing them
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # nats: smaller mean differences are none
CHUNK = 256  # tokens whose logits live at a time, on a CPU
ROOM = 32  # tokens that a decoder's cache grows by
NEVER = -1e30  # logit of tokens that are never drawn; finite, so that p * log p is 0
_source = functools.cache(inspect.getsource)  # of a function; parsing it takes milliseconds


# ---- prompts ----


@dataclass
class PromptInfo:
    """What every rank knows of every prompt: enough to plan the packs of all ranks alike."""

    index: int  # its row in the data set
    length: int  # P, tokens
    kinds: tuple[str, ...]  # names of its inputs beside text: ("image_grid_thw", "pixel_values")


@dataclass
class Medium:
    """A picture or a clip."""

    inputs: dict[str, Tensor]  # its share of what the processor made: pixel_values, image_grid_thw, ...
    key: bytes  # equal ones are encoded once


@dataclass
class Prompt(PromptInfo):
    """What the rank knows that runs it."""

    inputs: dict[str, Tensor]  # all that the processor made: input_ids (1, P), pixel_values, ...
    ids: Tensor  # (P,)
    positions: Tensor  # (P,), or (3, P) for M-RoPE
    media: dict[str, list[Medium]]  # "image" and "video", in the order of their places
    token_inputs: tuple[str, ...]  # inputs with an entry per token that packs have too: token_type_ids
    next_inputs: dict[str, Tensor]  # (1, 1): what `generate` gives for the token after the prompt
    unpackable: tuple[str, ...]  # inputs that packs have no place for
    row: dict | None = None  # of the data set, for rewards
    messages: list[dict] | None = None  # the chat with opened media, for other samplers
    seed: int = 0  # of what is sampled for it


@dataclass
class Response:
    """What a sampler says to a prompt."""

    ids: Tensor  # (R,), on the CPU, with EOS where it was drawn
    logprobs: Tensor  # (R,): of each token, as it was drawn
    truncated: bool  # cut by the length limit


def encode_chat(processor, messages: list[dict], **template) -> dict:
    """Messages of parts -> what the processor, or a text model's tokenizer, makes of them. A
    video's part has its frames and their metadata: which of how many, at what rate."""
    metadata = [part["metadata"] for m in messages for part in m["content"] if part["type"] == "video"]
    if metadata:
        template["processor_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
    if not hasattr(processor, "tokenizer"):
        messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
        if processor.chat_template is None:
            return processor("".join(m["content"] for m in messages), return_tensors="pt")
    template |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, **template)


def make_prompt(model, inputs: dict, index: int = 0, row: dict | None = None, messages=None) -> Prompt:
    """The processor's output for one prompt -> the prompt as the functions below take it. What
    an input is for, the signatures of the model's methods say."""
    inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    ids = inputs["input_ids"][0]
    base = model.base_model
    per_token = {name: x for name, x in inputs.items() if x.shape[:2] == (1, len(ids))}
    others = inputs.keys() - per_token.keys()
    media_names = {kind: _parameters(type(base), method) & others for kind, method in ENCODERS.items()}
    of_positions = _parameters(type(base), "get_rope_index")
    unpackable = others - of_positions - media_names["image"] - media_names["video"]
    own_names = per_token.keys() - of_positions - {"input_ids", "attention_mask"}
    return Prompt(
        index=index,
        length=len(ids),
        kinds=tuple(sorted(unpackable | media_names["image"] | media_names["video"])),
        inputs=inputs,
        ids=ids,
        positions=_prompt_positions(model, inputs),
        media={
            kind: _split_media({n: inputs[n] for n in sorted(names)}) for kind, names in media_names.items()
        },
        token_inputs=tuple(sorted(own_names & _parameters(type(base), "forward"))),
        next_inputs={name: x[:, -1:] for name, x in _extended(model, per_token).items()},
        unpackable=tuple(sorted(unpackable)),
        row=row,
        messages=messages,
    )


@functools.cache
def _parameters(model_class: type, method: str) -> frozenset[str]:
    """The names of a method's parameters; none where the model lacks it."""
    function = getattr(model_class, method, None)
    return frozenset(inspect.signature(function).parameters) if function else frozenset()


def _extended(model, per_token: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs with an entry per token -> those of a text one token longer, by the rule of the
    model's own generate: a new token is of type 0 for some models, and of 1 for others."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, GenerationMixin

    if not isinstance(model, GenerationMixin):  # a backbone: what generates by it; the rule needs no weights
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model.config), GenerationMixin)
        model = kind.__new__(kind)
    return model._update_model_kwargs_for_generation({}, dict(per_token), is_encoder_decoder=False)


def _split_media(inputs: dict[str, Tensor]) -> list[Medium]:
    """Inputs of a prompt's pictures -> those of each, where each has a row, or patches by a
    grid; else of all as one."""
    count = min(map(len, inputs.values()), default=0)
    grid = next((x for name, x in inputs.items() if name.endswith("grid_thw")), torch.empty(0, 3))
    patches = grid.long().prod(-1).tolist()
    sizes = {name: 1 if len(x) == count else patches for name, x in inputs.items()}
    shares = [inputs] if inputs else []
    if all(size == 1 or sum(size) == len(inputs[name]) for name, size in sizes.items()):
        columns = [x.split(sizes[name]) for name, x in inputs.items()]
        shares = [dict(zip(inputs, share)) for share in zip(*columns)]
    media = []
    for share in shares:
        content = b"".join(x.contiguous().numpy().tobytes() for x in share.values())
        media.append(Medium(inputs=share, key=hashlib.blake2b(content).digest()))
    return media


def _prompt_positions(model, inputs: dict) -> Tensor:
    """(P,), or (3, P) for models with M-RoPE, from the model's own `get_rope_index`. Never feed 2-D ids
    to one: it would copy them to all axes, and train another function than the one that samples."""
    ids = inputs["input_ids"]
    base = model.base_model
    if not hasattr(base, "get_rope_index"):
        return torch.arange(ids.shape[1])
    known = {name: inputs[name] for name in _parameters(type(base), "get_rope_index") & inputs.keys()}
    if not known.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}:
        return torch.arange(ids.shape[1]).expand(3, -1)
    known["attention_mask"] = torch.ones_like(ids)
    return base.get_rope_index(**known)[0][:, 0]


def media_of(prompts: list[Prompt]) -> dict[str, list[Medium]]:
    """The pictures and clips of some prompts."""
    return {kind: [medium for prompt in prompts for medium in prompt.media[kind]] for kind in ENCODERS}


def media_token_ids(config) -> list[int]:
    """Ids that stand for pictures or clips, or open and close them: never drawn."""
    name = re.compile("(image|video|vision|vision_start|vision_end|boi|eoi)_token_(id|index)")
    ids = {value for key, value in vars(config).items() if name.fullmatch(key)}
    return sorted(i for i in ids if isinstance(i, int) and 0 <= i < config.get_text_config().vocab_size)


# ---- plan ----


Groups = list[tuple[int, list[int]]]  # (index of a prompt, indices of its responses)


def plan_packs(
    groups: Groups, prompt_lengths: list, response_lengths: list, max_tokens: int, world_size: int = 1
) -> list[list[Groups]]:
    """Groups -> packs of at most max_tokens tokens: plan[rank][pack] = some of the groups.

    All ranks get equally many packs (some may be empty: collectives need everyone), balanced
    by cost = tokens + attended pairs / (6 * 2048), as attention compares with matrix products
    in a transformer block. A group over the budget is split by responses and its prompt
    repeated, only then. Longest processing time first: R. L. Graham 1969.

    >>> plan_packs([(0, [0, 1]), (1, [2])], [4, 3], [2, 2, 5], max_tokens=8, world_size=2)
    [[[(1, [2])]], [[(0, [0, 1])]]]
    """
    pieces = []  # (cost, tokens, prompt index, response indices)
    for prompt, members in groups:
        P = prompt_lengths[prompt]
        chunks = [[]]
        room = max_tokens - P
        for member in members:
            R = response_lengths[member]
            assert P + R <= max_tokens, f"{P} + {R} tokens never fit into a pack"
            if R > room:
                chunks.append([])
                room = max_tokens - P
            chunks[-1].append(member)
            room -= R
        for chunk in chunks:
            lengths = [response_lengths[member] for member in chunk]
            tokens = P + sum(lengths)
            pairs = P * P / 2 + sum(R * (P + R / 2) for R in lengths)
            pieces.append((tokens + pairs / (6 * 2048), tokens, prompt, chunk))
    pieces.sort(key=lambda piece: -piece[0])
    total = sum(tokens for _, tokens, _, _ in pieces)
    num_packs = max(1, math.ceil(total / (max_tokens * world_size))) * world_size
    packs = [[] for _ in range(num_packs)]
    room = [max_tokens] * num_packs
    load = [0.0] * num_packs
    for cost, tokens, prompt, members in pieces:
        if max(room) < tokens:  # another one for every rank
            packs += [[] for _ in range(world_size)]
            room += [max_tokens] * world_size
            load += [0.0] * world_size
        target = min((i for i in range(len(packs)) if room[i] >= tokens), key=load.__getitem__)
        packs[target].append((prompt, members))
        room[target] -= tokens
        load[target] += cost
    # Ranks wait for the slowest at every pack: neighbours in the order of load run side by side.
    order = sorted(range(len(packs)), key=lambda i: -load[i])
    return [[packs[i] for i in order[rank::world_size]] for rank in range(world_size)]


def packs_of_rank(
    groups: Groups, prompts: list[PromptInfo], encode: Callable[[int], Prompt], responses: list[Tensor],
    max_tokens: int, rank: int = 0, world_size: int = 1, packed: bool = True, media_everywhere: bool = False,
) -> Iterator["Pack"]:  # fmt: skip
    """One rank's packs of some groups; all ranks have equally many: collectives need everyone.

    encode: row of the data set -> the whole prompt, asked for those that this rank needs.
    media_everywhere: pictures in every pack on every rank, or in none: ZeRO-3 gathers a vision
    tower where it runs, 1 and 2 reduce its gradients in buckets. A prompt without responses
    adds no loss, but takes part in all of that.
    """
    wanted = {}  # kind of input -> a prompt that has it, added where no other one has
    if packed:
        prompt_lengths = [prompt.length for prompt in prompts]
        response_lengths = [len(response) for response in responses]
        plan = plan_packs(groups, prompt_lengths, response_lengths, max_tokens, world_size)[rank]
        if media_everywhere:
            wanted = {kind: g for g, _ in groups for kind in prompts[g].kinds}
    else:  # one response at a time; on all ranks, prompts with the same inputs side by side
        alike, plan = defaultdict(list), []
        for g, members in groups:
            alike[prompts[g].kinds] += [(g, [b]) for b in members] or [(g, [])]
        for pieces in alike.values():
            pieces += [(pieces[0][0], [])] * (-len(pieces) % world_size)
            plan += [[piece] for piece in pieces[rank::world_size]]
    for pieces in plan:
        pieces = pieces or [(groups[0][0], [])]
        for kind, g in wanted.items():
            if not any(kind in prompts[other].kinds for other, _ in pieces):
                pieces = [*pieces, (g, [])]
        whole = {g: encode(prompts[g].index) for g, _ in pieces}
        make = build_pack if packed else plain_pack
        yield make(pieces, whole, responses)


# ---- pack ----


class Pack(NamedTuple):
    inputs: dict  # input_ids (1, N), position_ids (1, N) or (3, 1, N), layout; plain: the processor's
    media: dict[str, list[Medium]]  # of media_of: what each slot of the row shows
    response_index: Tensor  # (S,): which of the B responses are here
    token_index: tuple[Tensor, Tensor]  # (M,), (M,): the places of their tokens in a (B, R) table
    owner: Tensor  # (M,): which of the S responses each token is of: lengths 2, 3 -> 0 0 1 1 1
    targets: Tensor  # (M,): the response tokens
    predict_from: Tensor  # (M,): row position of the hidden state that predicts each of them
    last: Tensor  # (S,): row position of each response's last token

    def tokens(self, table: Tensor) -> Tensor:
        """(B, R), a number per token of all responses -> (M,), those of the pack."""
        return table.to(self.owner.device, non_blocking=True)[self.token_index]

    def responses(self, vector: Tensor) -> Tensor:
        """(B,), a number per response -> (S,), those of the pack."""
        return vector.to(self.owner.device, non_blocking=True)[self.response_index]

    def to(self, device) -> "Pack":
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


def build_pack(pieces: Groups, prompts: dict[int, Prompt], responses: list[Tensor]) -> Pack:
    """Lay out the groups of a planned pack: prompts by prompt index, responses, (R,) each, by theirs."""
    positions = []
    groups = []  # of each group the row positions of [prompt, response, ...]
    offset = 0
    for g, members in pieces:
        prompt = prompts[g]
        if prompt.unpackable:
            raise CannotPack(f"packs have no place for its {', '.join(prompt.unpackable)}")
        positions.append(prompt.positions)
        # All axes go on from the last token: a long video's frames may lie beyond the text after it.
        next_position = int(prompt.positions[..., -1].max()) + 1
        segments = []
        for length in [prompt.length, *(len(responses[b]) for b in members)]:
            segments.append(torch.arange(offset, offset + length))
            offset += length
        for segment in segments[1:]:
            R = len(segment)
            positions.append((next_position + torch.arange(R)).expand(*prompt.positions.shape[:-1], R))
        groups.append(segments)
    position_ids = torch.cat(positions, dim=-1)  # (N,) or (3, N)
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids[:, None]
    inputs = {"position_ids": position_ids, "layout": make_layout(groups)}
    for name in ("input_ids", *{name for g, _ in pieces for name in prompts[g].token_inputs}):
        rows = [_per_token(prompts[g], name, [responses[b] for b in members]) for g, members in pieces]
        inputs[name] = torch.cat(rows, dim=1)  # (1, N)
    # Without a mask transformers takes jumps of positions for boundaries between texts.
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    places = [torch.cat([prompt[-1:], answer]) for prompt, *answers in groups for answer in answers]
    return _make_pack(inputs, media_of([prompts[g] for g, _ in pieces]), pieces, responses, places)


def plain_pack(pieces: Groups, prompts: dict[int, Prompt], responses: list[Tensor]) -> Pack:
    """For the plain path: one prompt, at most one response, all of the processor's inputs."""
    ((g, members),) = pieces
    prompt = prompts[g]
    own = [responses[b] for b in members]
    inputs = prompt.inputs | {name: _per_token(prompt, name, own) for name in prompt.next_inputs}
    places = [torch.arange(len(ids) + 1) + prompt.length - 1 for ids in own]
    return _make_pack(inputs, {}, pieces, responses, places)


def _per_token(prompt: Prompt, name: str, responses: list[Tensor]) -> Tensor:
    """An input of a prompt and responses to it, as in generate, (1, P + R); 0 where there is none."""
    if name == "input_ids":
        return torch.cat([prompt.ids, *responses])[None]
    R = sum(map(len, responses))
    if name not in prompt.inputs:
        return torch.zeros(1, prompt.length + R, dtype=torch.long)
    return torch.cat([prompt.inputs[name], prompt.next_inputs[name].repeat_interleave(R, dim=1)], dim=1)


def _make_pack(inputs: dict, media: dict, pieces: Groups, responses: list, places: list[Tensor]) -> Pack:
    """places: row positions of the token before each response and of its R tokens, (R + 1,)."""
    members = [b for _, own in pieces for b in own]
    none = torch.empty(0, dtype=torch.long)
    response_index = torch.tensor(members, dtype=torch.long)
    lengths = torch.tensor([len(responses[b]) for b in members], dtype=torch.long)
    owner = torch.repeat_interleave(lengths)
    columns = torch.cat([none, *map(torch.arange, lengths.tolist())])
    return Pack(
        inputs=inputs,
        media=media,
        response_index=response_index,
        token_index=(response_index[owner], columns),
        owner=owner,
        targets=torch.cat([none, *(responses[b] for b in members)]),
        predict_from=torch.cat([none, *(place[:-1] for place in places)]),
        last=torch.cat([none, *(place[-1:] for place in places)]),
    )


# ---- proof ----


def enable_packing_if_exact(
    model,
    forward: Callable,
    prompts: list[Prompt],
    max_length: int,
    max_tokens: int,
    temperature: float = 1.0,
) -> str:
    """Switch to packed attention if it gives the log-probs of the unmodified model on some real
    prompts -> a line that says which path is taken, and why. forward: pack -> log-probs (M,) or
    scores (S,). max_length: tokens of prompt and response; max_tokens: of a pack. Collective."""
    by_kind = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.length):
        by_kind[prompt.kinds].append(prompt)
    probes = [prompt for alike in by_kind.values() for prompt in (alike[0], alike[-1])]  # short and long ones
    try:
        if max_length > (limit := _length_of_fixed_angles(model)):
            raise CannotPack(f"texts of more than {limit} tokens change the RoPE of all others in a pack")
        gap = packing_gap(model, forward, probes, max_tokens, temperature)
        if not gap < TOLERANCE[model.dtype]:  # or NaN
            raise CannotPack(f"its log-probs are {gap:.1e} nats from those of the unmodified model")
    except CannotPack as reason:
        return f"warning: one response at a time, exact but slow, since this model can't be packed: {reason}"
    switch_attention(model, "packed")
    return f"packed = unmodified model within {gap:.0e} nats"


def _length_of_fixed_angles(model) -> float:
    """Beyond it, RoPE of the kinds dynamic and longrope turns every token by other angles."""
    config = model.config.get_text_config()
    rope = json.dumps(getattr(config, "rope_parameters", None), default=str)
    if not re.search("dynamic|longrope", rope):
        return math.inf
    lengths = [int(n) for n in re.findall(r'"original_max_position_embeddings": (\d+)', rope)]
    return min([config.max_position_embeddings, *lengths])


@torch.no_grad()
def packing_gap(
    model, forward: Callable, prompts: list[Prompt], max_tokens: int, temperature: float = 1.0
) -> float:
    """Difference, in nats, of packed and of decoded log-probs from the unmodified model's: mean over
    a response, the worst of two to each prompt. These are the prompt's own words: random tokens
    would be twice as noisy in bf16. The prompts end a pack of about max_tokens, so that a model
    that depends on places in a row is found out."""
    never = torch.tensor(media_token_ids(model.config), dtype=torch.long)
    responses = []
    for prompt in prompts:
        words = prompt.ids[~torch.isin(prompt.ids, never)].repeat(24)[-24:]
        responses += [words[:12], words[12:19]]
    by_place = dict(enumerate(prompts))
    groups = [(i, [2 * i, 2 * i + 1]) for i in by_place]
    singles = [(i, [b]) for i, members in groups for b in members]
    # Of each response its log-probs, or its score:
    expected = [forward(plain_pack([single], by_place, responses).to(model.device)) for single in singles]

    def gap_of(found: Tensor) -> Tensor:
        parts = found.split([len(x) for x in expected])
        return torch.stack([(x - y).abs().mean() for x, y in zip(parts, expected)]).max()

    before = switch_attention(model, "packed")
    if not is_packed(model):
        raise CannotPack("its attention is not one of transformers' AttentionInterface")
    try:
        filling = [(0, [])] * ((max_tokens - sum(p.length + 19 for p in prompts)) // prompts[0].length)
        pack = build_pack([*filling, *groups], by_place, responses).to(model.device)
        gap = gap_of(forward(pack))
        is_sharded = hasattr(next(model.parameters()), "ds_id")
        samples = model.get_output_embeddings() is not None and not is_sharded
        if samples and gap < TOLERANCE[model.dtype]:  # decoding begins with a pack
            table = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True).to(model.device)  # (B, 12)
            decoder = Decoder(model, prompts, 2)
            decoded = torch.zeros(table.shape, device=model.device)
            for t, token in enumerate(table.T):
                logp = next_logprobs(model, decoder.hidden, temperature)  # (B, V)
                decoded[:, t] = logp.gather(1, token[:, None])[:, 0]
                decoder.step(token)
            gap = torch.maximum(gap, gap_of(decoded[pack.token_index]))  # or NaN
        return gap.item()
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        # What the model's code has no place for; full memory, or a bug of ours, ends the run.
        raise CannotPack(f"{type(error).__name__}, {error}") from error
    finally:
        switch_attention(model, before)


# ---- decoding ----


class RoomyLayer(DynamicLayer):
    """One layer's keys and values of the rows' own tokens, (B, kv_heads, t, D), with room for more:
    all of them are copied every ROOM tokens, not at each."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)  # (B, kv_heads, 1, D)
        t = self.get_seq_length()
        if t == 0:
            self.lazy_initialization(key_states, value_states)
            self.stores = [F.pad(x, (0, 0, 0, ROOM - 1)) for x in new]
        elif t == self.stores[0].shape[2]:
            self.stores = [F.pad(x, (0, 0, 0, ROOM)) for x in self.stores]
        for store, x in zip(self.stores, new):
            store[:, :, t : t + 1] = x
        self.keys, self.values = (store[:, :, : t + 1] for store in self.stores)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.stores = [store[indices] for store in self.stores]


class Decoder:
    """Token-by-token decoding of G rows for each of n prompts, which are run once, as a pack.
    The rows of a prompt share its keys and values without a copy. Needs packed attention."""

    @torch.no_grad()
    def __init__(self, model, prompts: list[Prompt], G: int):
        self.base = model.base_model
        self.G = G
        device = model.device
        lengths = torch.tensor([prompt.length for prompt in prompts])  # (n,)
        ends = lengths.cumsum(0)
        column = torch.arange(int(lengths.max()))
        self.valid = (column < lengths[:, None]).to(device)  # (n, P): False where there is padding
        self.places = ((ends - lengths)[:, None] + column).clamp(max=int(ends[-1]) - 1).to(device)  # (n, P)
        self.keys = {}  # of each layer (n, kv_heads, P, D)
        self.values = {}
        pack = build_pack([(i, []) for i in range(len(prompts))], dict(enumerate(prompts)), [])
        hidden = _run(model, pack.to(device), decoder=self)  # (N, H)
        # (n * G, H): predict the next tokens
        self.hidden = hidden[ends.to(device) - 1].repeat_interleave(G, dim=0)
        self.cache = Cache(layer_class_to_replicate=RoomyLayer)  # of the rows' own tokens
        self.rows = torch.arange(len(prompts) * G, device=device)  # row b: response rows[b] % G of its prompt
        self.lengths = lengths.to(device).repeat_interleave(G)  # (n * G,)
        # Not the largest: the frames of a long video may lie beyond the text after it.
        last = torch.stack([prompt.positions[..., -1] for prompt in prompts], dim=-1)  # ([3,] n)
        self.next_position = last.repeat_interleave(G, -1)[..., None].to(device) + 1  # ([3,] n * G, 1)

    def remember(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Of the prompts' pack, (1, kv_heads, N, D)."""
        self.keys[layer] = key[0][:, self.places].transpose(0, 1)
        self.values[layer] = value[0][:, self.places].transpose(0, 1)

    def keep(self, alive: Tensor) -> None:
        """Go on with some rows only: their places in the present batch."""
        self.cache.batch_select_indices(alive)
        self.rows = self.rows[alive]
        self.next_position = self.next_position[..., alive, :]

    @torch.no_grad()
    def step(self, token: Tensor) -> None:
        """Append one token per row, (rows,); `hidden` then predicts the next one."""
        out = self.base(
            input_ids=token[:, None],
            position_ids=self.next_position,
            past_key_values=self.cache,
            use_cache=True,
            decoder=self,
        )
        self.hidden = out.last_hidden_state[:, -1]
        self.next_position = self.next_position + 1

    def seen(self, mask: ModelMask, t: int) -> Tensor:
        """(B, P + t): what each row's t-th token sees of its prompt and of the row's own tokens."""
        valid = F.pad(self.valid[self.rows // self.G], (0, t), value=True)
        if mask.is_causal:
            return valid
        of_prompt = torch.arange(self.valid.shape[1], device=valid.device).expand(len(valid), -1)
        of_row = self.lengths[self.rows][:, None] + torch.arange(t, device=valid.device)
        own = torch.cat([of_prompt, of_row], dim=1)
        return mask.ask(own[:, -1:], own)[:, 0, 0] & valid

    def attend(
        self, layer: int, query, key, value, mask: ModelMask, scaling: float | None, eager: Callable | None
    ) -> Tensor:
        """One new token per row attends to its prompt, whose keys are read once for all its rows, and
        to the row's own tokens so far. query (B, heads, 1, D), key and value (B, kv_heads, t, D)."""
        keys, values, G = self.keys[layer], self.values[layer], self.G
        n, kv_heads, P, D = keys.shape
        B, heads, _, _ = query.shape
        t = key.shape[2]
        seen = mask.once("step", lambda: self.seen(mask, t))[:, None]  # (B, 1, P + t)
        if eager:  # with a copy
            owner = self.rows // G
            k, v = torch.cat([keys[owner], key], dim=2), torch.cat([values[owner], value], dim=2)
            return eager(query, k, v, seen[:, None])

        def by_prompt(x: Tensor) -> Tensor:  # (B, heads, d) -> (n, kv_heads, G * heads per kv head, d)
            slots = x.new_zeros(n * G, heads, x.shape[-1]).index_copy(0, self.rows, x)
            return slots.view(n, G, kv_heads, -1, x.shape[-1]).transpose(1, 2).flatten(2, 3)

        def by_row(x: Tensor) -> Tensor:  # and back
            x = x.view(n, kv_heads, G, heads // kv_heads, -1).transpose(1, 2)
            return x.reshape(n * G, heads, -1)[self.rows]

        q = query[:, :, 0] * (D**-0.5 if scaling is None else scaling)  # (B, heads, D)
        to_prompt = by_row(by_prompt(q) @ keys.transpose(-1, -2))  # (B, heads, P)
        to_own = (q.view(B, kv_heads, -1, D) @ key.transpose(-1, -2)).flatten(1, 2)  # (B, heads, t)
        scores = torch.cat([to_prompt, to_own], dim=-1).masked_fill(~seen, float("-inf"))
        weights = scores.float().softmax(-1).to(query.dtype)
        on_prompt, on_own = weights.split([P, t], dim=-1)
        of_prompt = by_row(by_prompt(on_prompt) @ values)  # (B, heads, D)
        of_own = (on_own.view(B, kv_heads, -1, t) @ value).flatten(1, 2)
        return (of_prompt + of_own)[:, None]  # (B, 1, heads, D)


@torch.no_grad()
def generate_plain(
    model, prompts: list[Prompt], G: int, max_length: int, end_ids: list[int], temperature: float
) -> list[Response]:
    """The plain path: model.generate, by each prompt's `seed` -> G responses to each."""
    responses = []
    suppressed = media_token_ids(model.config)
    for prompt in prompts:
        # Asked for G sequences, generate would repeat each patch of a picture, not the picture.
        inputs = {name: torch.cat([x] * G) for name, x in prompt.inputs.items()}
        torch.manual_seed(prompt.seed)
        out = model.generate(
            **_to_model(inputs, model), max_new_tokens=max_length, eos_token_id=end_ids, output_scores=True,
            pad_token_id=end_ids[0], do_sample=temperature > 0, temperature=temperature or 1.0, top_p=1.0,
            top_k=0, repetition_penalty=1.0, suppress_tokens=suppressed or None, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[:, -len(out.scores) :].cpu()  # (G, R)
        table = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)  # (G, R)
        for ids, logprobs in zip(tokens, table.cpu()):
            ends = torch.isin(ids, torch.tensor(end_ids)).nonzero()[:, 0].tolist()
            length = ends[0] + 1 if ends else len(ids)
            responses.append(Response(ids[:length], logprobs[:length], truncated=not ends))
    return responses


# ---- forward ----


def forward_hidden(model, pack: Pack, last: bool = False) -> Tensor:
    """Hidden states (M, H) that predict the response tokens of a pack, or with last=True those
    of each response's last token, (S, H), which a score head reads. model: a *ForCausalLM,
    *ForConditionalGeneration, or the backbone of one."""
    return _run(model, pack)[pack.last if last else pack.predict_from]


def _run(model, pack: Pack, **options) -> Tensor:
    """-> hidden states of the whole row, (N, H)"""
    inputs = _to_model(pack.inputs, model) | encode_media(model.base_model, pack.media)
    return model.base_model(**inputs, **options, use_cache=False).last_hidden_state.flatten(0, 1)


def encode_media(base, media: dict[str, list[Medium]]) -> dict:
    """The vision tower on each different picture and clip -> a keyword for the model, by slot."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    outputs = {}
    for kind, slots in media.items():
        if not slots:
            continue
        of_one_shape = defaultdict(dict)  # these run together
        for medium in slots:
            shape = tuple((name, x.shape[1:]) for name, x in medium.inputs.items())
            of_one_shape[shape][medium.key] = medium.inputs
        encoded = {}
        for different in of_one_shape.values():
            encoded |= zip(different, _encode(base, ENCODERS[kind], list(different.values())))
        features, *of_layers = (_join(parts) for parts in zip(*(encoded[medium.key] for medium in slots)))
        outputs[kind] = BaseModelOutputWithPooling(pooler_output=features)
        outputs[kind].deepstack_features = of_layers or None  # of each tapped layer
    return {"mm_encoder_outputs": outputs} if outputs else {}


def _encode(base, method: str, items: list[dict]) -> list[list]:
    """Inputs of some media -> of each its features, and those of tapped layers."""
    n = len(items)
    inputs = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    out = getattr(base, method)(**_to_model(inputs, base), return_dict=True)
    layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    if n == 1:
        return [layers]
    # A list has an entry per medium, a tensor equally many rows (pictures, tiles) of tokens.
    for layer in layers:
        is_by_row = torch.is_tensor(layer) and layer.dim() > 2 and len(layer) % n == 0
        if len(layer) != n and not is_by_row:
            return [_encode(base, method, [item])[0] for item in items]
    shares = []
    for i in range(n):
        shares.append([layer[len(layer) // n * i : len(layer) // n * (i + 1)] for layer in layers])
    return shares


def _join(parts: tuple) -> list | Tensor:
    if not torch.is_tensor(parts[0]):
        return [x for part in parts for x in part]
    alike = len({x.shape[1:] for x in parts}) == 1  # some models want their tiles as they are
    return torch.cat(parts if alike else [x.flatten(0, -2) for x in parts])


def _to_model(inputs: dict, model) -> dict:
    """To the model's device, pixels in its precision."""

    def move(x: Tensor) -> Tensor:
        dtype = model.dtype if x.is_floating_point() else x.dtype
        return x.to(model.device, dtype, non_blocking=True)

    return tree_map_only(Tensor, move, inputs)


def response_logprobs(
    model, pack: Pack, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (M,) of a pack's response tokens and, if asked for, the entropies (M,) of their
    distributions, in nats, fp32, at a temperature, without the placeholders of pictures."""
    suppressed = media_token_ids(model.config)
    if "layout" in pack.inputs:
        head = model.get_output_embeddings()
        factor, softcap = after_head(model)
        return logprobs_from_hidden(
            hidden=forward_hidden(model, pack),  # (M, H)
            weight=head.weight,  # (V, H)
            bias=getattr(head, "bias", None),  # (V,)
            targets=pack.targets,
            temperature=temperature / factor,
            softcap=softcap,
            suppressed=suppressed,
            with_entropy=with_entropy,
        )
    logits = model(**_to_model(pack.inputs, model), use_cache=False).logits[0, pack.predict_from]
    logp = to_logprobs_(logits, temperature, suppressed)  # (M, V)
    entropy = -torch.linalg.vecdot(logp.exp(), logp) if with_entropy else None
    return logp.gather(1, pack.targets[:, None])[:, 0], entropy


def next_logprobs(model, hidden: Tensor, temperature: float) -> Tensor:
    """The same of all tokens, from the hidden states of a Decoder: (rows, H) -> (rows, V)."""
    factor, softcap = after_head(model)
    logits = model.get_output_embeddings()(hidden)
    return to_logprobs_(logits, temperature / factor, media_token_ids(model.config), softcap)


def after_head(model) -> tuple[float, float | None]:
    """What the model's own forward, by its source, does to logits: a factor, before it a soft cap."""
    config = model.config.get_text_config()
    source = _source(type(model).forward)

    def number(name: str) -> float | None:
        return getattr(config, name, None) if name in source else None

    factor = (number("logit_scale") or 1.0) / (number("logits_scaling") or 1.0)
    softcap = number("final_logit_softcapping")
    return factor, softcap / factor if softcap else None


def logprobs_from_hidden(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, suppressed=(),
    with_entropy: bool = False, bias: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """log_softmax(logits / temperature) at `targets`, without the `suppressed` ids, and entropies,
    where logits = hidden @ weight.T + bias, bent by softcap * tanh(logits / softcap).

    hidden (M, H), weight (V, H), targets (M,), bias (V,) -> (M,), (M,) or None. Peak memory does
    not grow with M x V: logits live for a chunk of tokens at a time, in forward and, computed
    again, in backward. The first chunks' are kept for it, up to KEPT_LOGPROBS numbers.
    """

    def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = F.linear(hidden, weight, bias)  # (chunk, V)
        logp = to_logprobs_(logits, temperature, suppressed, softcap)
        entropy = -torch.linalg.vecdot(logp.exp(), logp) if with_entropy else None
        return logp.gather(1, targets[:, None])[:, 0], entropy

    # On a GPU fewer chunks: each reads and writes the whole gradient of the head.
    size = 4 * CHUNK if hidden.is_cuda else CHUNK
    num_kept = KEPT_LOGPROBS // (size * len(weight))
    logprobs = []
    entropies = []
    for i, chunk in enumerate(zip(hidden.split(size), targets.split(size))):
        if i < num_kept:
            logprob, entropy = of_chunk(*chunk)
        else:
            logprob, entropy = checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def to_logprobs_(
    logits: Tensor, temperature: float, suppressed: list[int], softcap: float | None = None
) -> Tensor:
    """Logits (..., V) -> log-probs in fp32, at a temperature, the suppressed ids out of reach. Logits
    that are in fp32 already are changed in place, since they are the peak of memory."""
    logits = logits.float()
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if temperature != 1:
        logits.div_(temperature)
    if suppressed:  # one by one: a list of them as an index would be a copy that the GPU waits for
        never = logits.new_zeros(logits.shape[-1])
        for i in suppressed:
            never[i] = NEVER
        logits.add_(never)
    return logits.log_softmax(-1)
