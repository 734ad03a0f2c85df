"""Videos: which frames are taken, what the processors learn of their times, log-probs as by the model itself, bad files."""

import common  # first: it mends torchvision beside a CPU-only torch # noqa: F401 # isort: skip
import importlib
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import test_packing as packing
import torch
import transformers
from conftest import SCRIPTS, read_jsonl, write_jsonl
from PIL import Image
from test_bad_input import assert_one_sentence

import ppo_vl
from common.packing import enable_packing, forward_hidden, logprobs_from_hidden, media_token_ids

FPS, FRAMES, SIZE = 8, 24, 64  # 3 seconds


def draw(k: int) -> np.ndarray:
    """Frame k: a white square that moves two pixels per frame to the right on grey."""
    frame = np.full((SIZE, SIZE, 3), 40, np.uint8)
    frame[24:40, 2 * k : 2 * k + 16] = 255
    return frame


def number_of(frame: np.ndarray) -> int:
    """Which frame this is, from where its square stands."""
    columns = (frame[24:40].mean((0, 2)) > 150).nonzero()[0]
    return round(columns.mean() - 7.5) // 2


def write_video(path: Path, count: int = FRAMES, codec: str = "libx264", **options) -> str:
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = SIZE, SIZE, "yuv420p"
        for k in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(draw(k), format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def write_animation(path: Path, durations: list[int], count: int = FRAMES) -> str:
    pictures = [Image.fromarray(draw(k)) for k in range(count)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, lossless=True)
    return str(path)


def write_frames(folder: Path, numbers, size: int = SIZE) -> list[str]:
    paths = [str(folder / f"frame{size}_{k}.png") for k in numbers]
    for k, path in zip(numbers, paths):
        Image.fromarray(draw(k)).resize((size, size)).save(path)
    return paths


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """ball.mp4, .mkv, .gif and .webp: the same 24 frames at 8 per second."""
    folder = tmp_path_factory.mktemp("video")
    write_video(folder / "ball.mp4")
    write_video(folder / "ball.mkv")
    for suffix in ("gif", "webp"):
        write_animation(folder / f"ball.{suffix}", [120, 130] * 12)
    return folder


# --- frames ----------------------------------------------------------------------------------------------------------


def load(source, fps: float, least: int = 2) -> tuple[list[int], dict]:
    frames, metadata = ppo_vl.load_video(source, Path("."), "row 0", fps, least)
    assert frames.dtype == np.uint8 and frames.shape == (len(frames), SIZE, SIZE, 3)
    return [number_of(frame) for frame in frames], metadata


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "gif", "webp"])
def test_frames_are_taken_at_the_rate_that_is_asked_for(folder, suffix):
    for fps, expected in (
        (2, [0, 4, 8, 12, 16, 20]),
        (4, list(range(0, 24, 2))),
        (8, list(range(24))),
        (30, list(range(24))),  # no more than there are
        (3, [0, 2, 5, 8, 10, 13, 16, 18, 21]),
        (0.1, [0, 12]),  # no fewer than a temporal patch holds
    ):
        numbers, metadata = load(str(folder / f"ball.{suffix}"), fps)
        assert numbers == expected == metadata["frames_indices"]
        assert metadata["total_num_frames"] == FRAMES and metadata["fps"] == pytest.approx(FPS)
    assert load(str(folder / f"ball.{suffix}"), 0.1, least=1)[0] == [0]


def test_a_file_of_one_frame_is_repeated_as_often_as_the_model_needs(tmp_path):
    one = write_video(tmp_path / "one.mp4", count=1)
    assert load(one, 2, least=1)[0] == [0]
    assert load(one, 2, least=2) == ([0, 0], {"total_num_frames": 1, "fps": FPS, "frames_indices": [0, 0]})


def test_lists_of_frames_are_taken_as_they_are(tmp_path):
    paths = write_frames(tmp_path, [0, 5, 20])
    expected = [0, 5, 20], {"total_num_frames": 3, "fps": 1.5, "frames_indices": [0, 1, 2]}
    assert load(paths, 1.5) == load([Image.open(path) for path in paths], 1.5) == expected


@pytest.mark.parametrize(
    "value, count", [(None, 0), ([], 0), ("a.mp4", 1), (["a.mp4", "b.mp4"], 2), (["a.png", "b.jpg"], 1), ([["a.png"]], 1)]
)  # fmt: skip
def test_a_list_of_pictures_is_one_video_and_a_list_of_files_several(value, count):
    assert len(ppo_vl.as_list(value, video=True)) == count


# --- processors ------------------------------------------------------------------------------------------------------


def load_family(family: str, tiny: str):
    """Tiny model and processor. There is but one tiny folder: the other families take its tokenizer and sizes."""
    processor = ppo_vl.load_processor(tiny)
    if family == "qwen2_5_vl":
        return ppo_vl.load_model(tiny, torch.float32).eval(), processor
    tokens = {f"{kind}_token_id": getattr(processor, f"{kind}_token_id") for kind in ("image", "video")}
    ids = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    tokens |= dict(zip(("vision_start_token_id", "vision_end_token_id"), ids))
    text, vision = {**packing.TEXT, **packing.MROPE, "vocab_size": len(processor.tokenizer)}, dict(packing.VISION)
    parts = {"tokenizer": processor.tokenizer, "chat_template": processor.chat_template}
    torch.manual_seed(0)
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
        model = transformers.Qwen2VLForConditionalGeneration(config)
        processor = transformers.Qwen2VLProcessor(
            image_processor=processor.image_processor, video_processor=processor.video_processor, **parts
        )
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
        config = transformers.Qwen3VLConfig(
            text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0, 1]}, **tokens
        )
        model = transformers.Qwen3VLForConditionalGeneration(config)
        video_processor = transformers.Qwen3VLVideoProcessor(**processor.video_processor.to_dict())
        processor = transformers.Qwen3VLProcessor(
            image_processor=processor.image_processor, video_processor=video_processor, **parts
        )
    for parameter in model.parameters():  # attention that matters, as in test_packing
        noise = torch.randn_like(parameter) * 0.15
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model.float().eval(), processor


@pytest.fixture(scope="module", params=packing.QWEN_VL)
def family(request, tiny):
    return request.param, *load_family(request.param, tiny)


def make_row(prompt: str, videos=(), images=(), fps: float = 2.0, number: int = 0) -> dict:
    columns = {"prompt": "prompt", "image": "images", "video": "videos", "answer": None, "label": None}
    data = {"columns": columns, "system_prompt": None, "plain_prompts": False, "template_kwargs": {}, "video_fps": fps}
    data["recipe"] = {"default": []}
    row = {"prompt": prompt, "images": list(images), "videos": list(videos)}
    return ppo_vl.read_row(row, {**data, "folder": Path(".")}, f"data row {number}")


def process(processor, row: dict) -> dict:
    return ppo_vl.run_processor(processor, row, ppo_vl.render_chat(processor, row))


def test_the_processor_learns_when_frames_were_taken(family, folder, caplog):
    name, _, processor = family
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        for fps, seconds, stamps in (
            (2, 1.0, ["0.2", "1.2", "2.2"]),
            (4, 0.5, ["0.1", "0.6", "1.1", "1.6", "2.1", "2.6"]),
        ):
            inputs = process(processor, make_row("what?", [str(folder / "ball.mp4")], fps=fps))
            text = processor.tokenizer.decode(inputs["input_ids"][0])
            assert int(inputs["video_grid_thw"][0, 0]) == len(stamps)
            if name == "qwen2_5_vl":
                assert inputs["second_per_grid_ts"].tolist() == [seconds]
            if name == "qwen3_vl":
                assert text.count(" seconds>") == len(stamps)
                assert all(f"<{stamp} seconds><|vision_start|><|video_pad|>" in text for stamp in stamps)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "fps" not in caplog.text and "metadata" not in caplog.text


def test_each_of_several_videos_has_its_own_time(tiny, folder, tmp_path):
    model, processor = load_family("qwen2_5_vl", tiny)
    row = make_row("what?", [str(folder / "ball.mp4"), write_frames(tmp_path, range(6))], fps=4)
    inputs = process(processor, row)
    assert inputs["second_per_grid_ts"].tolist() == [0.5, 0.5]
    one = process(processor, make_row("what?", [write_video(tmp_path / "one.mp4", 1), str(folder / "ball.gif")], fps=4))
    assert one["second_per_grid_ts"].tolist() == [pytest.approx(0.125), pytest.approx(0.5)]
    assert one["video_grid_thw"][:, 0].tolist() == [1, 6]
    [sample] = ppo_vl.encode_prompts(model, processor, [row])
    times = sample["position_ids"][0][sample["prompt_ids"] == processor.video_token_id]
    assert (times[96:] - times[96]).unique().tolist() == [0, 1, 2]  # 2 positions a second


def test_placeholders_that_are_not_as_many_as_features_are_refused(family, folder, tmp_path, capfd):
    _, _, processor = family
    row = make_row("what?", [str(folder / "ball.mp4")], write_frames(tmp_path, [0]), number=7)
    inputs = process(processor, row)
    assert ppo_vl.check_placeholders(processor, row, inputs) is None
    for kind in ("image", "video"):
        ids = inputs["input_ids"].clone()
        ids[0, (ids[0] == getattr(processor, f"{kind}_token_id")).nonzero()[0, 0]] = 5
        with pytest.raises(SystemExit) as stopped:
            ppo_vl.check_placeholders(processor, row, {**inputs, "input_ids": ids})
        assert stopped.value.code == 2
        assert_one_sentence(capfd.readouterr().err, ["data row 7", f"{kind} tokens", "chat template"])
    no_grid = {"input_ids": torch.tensor([[1, 2, 3]])}  # LLaVA
    with pytest.raises(SystemExit):
        ppo_vl.check_placeholders(processor, row, no_grid)
    assert_one_sentence(capfd.readouterr().err, ["data row 7", "0 image tokens"])


# --- log-probs -------------------------------------------------------------------------------------------------------


def encode(model, processor, rows: list[dict]) -> list[dict]:
    """Prompts as the scripts make them, and under "inputs" what the processor gave: the unmodified model reads that."""
    prompts = ppo_vl.encode_prompts(model, processor, rows)
    for prompt, row in zip(prompts, rows):
        inputs = {k: v for k, v in process(processor, row).items() if k not in ("input_ids", "attention_mask")}
        if "second_per_grid_ts" in inputs:
            inputs["second_per_grid_ts"] = inputs["second_per_grid_ts"].tolist()
        if not row["videos"] and not row["images"]:
            assert "pixel_values" not in inputs
        inputs["mm_token_type_ids"] = torch.as_tensor(inputs["mm_token_type_ids"])
        prompt["inputs"] = inputs
    return prompts


def video_batch(folder: Path, tmp_path: Path) -> list[dict]:
    long = write_frames(tmp_path, range(0, 24))  # its frames' times lie beyond the positions of the text after it
    return [
        make_row("what moves in <video>?", [str(folder / "ball.mp4")]),
        make_row(
            "<video> or <video>, which is longer?", [str(folder / "ball.gif"), write_video(tmp_path / "b.mp4", 9)]
        ),
        make_row("what is it?", [long], fps=0.5),
        make_row("where does it go?", [str(folder / "ball.mp4")]),  # the same clip again
    ]


def mixed_batch(folder: Path, tmp_path: Path) -> list[dict]:
    pictures = write_frames(tmp_path, [3, 11], size=48)
    return [
        make_row("first <image>, then <image>: the same?", images=pictures),
        make_row("what moves?", [str(folder / "ball.mp4")]),
        make_row("is grass green?"),
        make_row("is <image> in <video>?", [str(folder / "ball.webp")], pictures[:1]),
    ]


def ask(processor, rows: list[dict], lengths: list[list[int]]):
    groups, flat = [], []
    for g, group in enumerate(lengths):
        groups.append((g, list(range(len(flat), len(flat) + len(group)))))
        flat += group
    high = min(300, processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"))
    generator = torch.Generator().manual_seed(1)
    return groups, [torch.randint(5, 60 if high < 60 else high, (R,), generator=generator) for R in flat]


@pytest.mark.parametrize("batch", [video_batch, mixed_batch])
def test_packed_equals_row_by_row(family, batch, folder, tmp_path):
    """Against the unmodified model without position_ids, gradients too; all rows with all responses in one pack."""
    name, _, processor = family
    model, reference = (load_family(name, ppo_vl.ROOT / "assets/tiny_vl")[0] for _ in range(2))
    rows = batch(folder, tmp_path)
    prompts = encode(model, processor, rows)
    groups, responses = ask(processor, rows, [[4, 1, 7], [3, 3], [6, 2, 1], [5]])
    expected = packing.one_by_one(reference, groups, prompts, responses)
    assert enable_packing(model)
    packs = packing.make_packs(groups, prompts, responses)
    assert len(packs) == 1
    packing.assert_same(packing.packed(model, packs, responses), expected)
    packing.assert_same(
        packing.packed(model, packing.make_packs(groups, prompts, responses, shared=False), responses), expected
    )


def test_the_long_video_runs_beyond_the_text(family, folder, tmp_path):
    """What makes the batch above a test of positions: continuing from the largest would be another function."""
    name, model, processor = family
    position_ids = ppo_vl.encode_prompts(model, processor, video_batch(folder, tmp_path)[2:3])[0]["position_ids"]
    assert (position_ids.max() > position_ids[:, -1].max()) == (name == "qwen2_5_vl")


def test_sampler_and_trainer_agree_on_videos(family, folder, tmp_path):
    name, _, processor = family
    model, _ = load_family(name, ppo_vl.ROOT / "assets/tiny_vl")
    enable_packing(model)
    samples = ppo_vl.encode_prompts(model, processor, video_batch(folder, tmp_path) + mixed_batch(folder, tmp_path))
    args = SimpleNamespace(max_response_length=10, top_p=1.0)
    with torch.no_grad():
        ids, drawn, _ = ppo_vl.generate(model, samples, 2, args, [0], 1.0, torch.Generator().manual_seed(0))
        [pack] = packing.make_packs([(g, [2 * g, 2 * g + 1]) for g in range(len(samples))], samples, ids)
        hidden = forward_hidden(model, pack)
        logp, _ = logprobs_from_hidden(hidden, model.lm_head.weight, pack.targets, 1.0, media_token_ids(model.config))
    torch.testing.assert_close(logp, torch.cat([drawn[b] for b, _ in pack.rows]), atol=1e-4, rtol=0)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed_file(folder, vqa_rows, tmp_path) -> str:
    """Rows with one picture, two, a video file, a list of frames, and text alone."""
    a, b = vqa_rows[0]["image"], vqa_rows[1]["image"]
    shutil.copy(folder / "ball.mp4", tmp_path / "near.mp4")  # relative paths are tried beside the data file
    rows = [
        {"prompt": "what shape is it?", "images": [a], "videos": []},
        {"prompt": "are <image> and <image> alike?", "images": [a, b], "videos": []},
        {"prompt": "what moves in <video>?", "images": [], "videos": ["near.mp4"]},
        {"prompt": "what moves?", "images": [], "videos": write_frames(tmp_path, range(0, 24, 6))},
        {"prompt": "is grass green?", "images": [], "videos": []},
        {"prompt": "which is longer?", "images": [], "videos": [str(folder / "ball.gif"), str(folder / "ball.mkv")]},
    ]
    return write_jsonl(tmp_path / "mixed.jsonl", [{**row, "answer": "yes"} for row in rows])


@pytest.mark.slow
def test_a_run_on_pictures_videos_and_text(run, mixed_file, any_reward):
    folder = run(dataset=mixed_file, eval_dataset=mixed_file, rollout_batch_size=24, train_batch_size=24, **any_reward)
    metrics = [record for record in read_jsonl(folder / "metrics.jsonl") if "policy/ratio" in record]
    assert len(metrics) == 2
    for record in metrics:
        assert all(np.isfinite(value) for value in record.values() if isinstance(value, (int, float)))
        assert record["rollout/engine_logprob_diff_max"] < 1e-4
    assert metrics[0]["train/skipped_updates"] == 0 and metrics[0]["policy/ratio"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("script", ["reward_bt", "grm_sft"])
def test_the_supervised_scripts_read_videos_too(script, argv, folder, tmp_path, monkeypatch):
    clip, frames = str(folder / "ball.mp4"), write_frames(tmp_path, range(0, 24, 4))
    rows = []
    for videos in ([clip], frames, [clip, str(folder / "ball.gif")], []):
        if script == "reward_bt":
            rows.append({"prompt": "what moves?", "chosen": "a square", "rejected": "a cat", "videos": videos})
        else:
            turns = [("user", "what moves?"), ("assistant", "a square")]
            rows.append({"messages": [{"role": r, "content": c} for r, c in turns], "videos": videos})
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    module = importlib.import_module(script)
    for name in [name for name in dir(module) if name.startswith("draw_")]:  # that takes longer than the steps
        monkeypatch.setattr(module, name, lambda *args: None)
    flags = {"dataset": source, "eval_dataset": None, "batch_size": 4, "max_steps": 2, "epochs": 2}
    module.main(module.parse_args(argv(script, **flags)))
    metrics = read_jsonl(tmp_path / "runs/run/metrics.jsonl")
    key = {"reward_bt": "rm/loss", "grm_sft": "loss/sft"}[script]
    assert all(np.isfinite(record[key]) for record in metrics if key in record) and key in metrics[-1]


# --- bad input -------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def cut(path: str, share: float) -> str:
    content = Path(path).read_bytes()
    return write(Path(path), content[: int(len(content) * share)])


def raw_stream(path: str) -> str:
    """The same pictures without a container, which would tell their number or duration."""
    with av.open(path) as container, av.open(path + ".h264", "w", format="h264") as raw:
        stream = raw.add_stream_from_template(container.streams.video[0])
        for packet in container.demux(video=0):
            if packet.size:
                packet.stream = stream
                raw.mux(packet)
    return path + ".h264"


def write_sound(path: Path) -> str:
    import wave

    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0\0" * 8000)
    return str(path)


BAD = {  # name: (words of the sentence, video from the test's folder)
    "missing": (["nope.mp4"], lambda t: "nope.mp4"),
    "empty file": (["can't be read"], lambda t: write(t / "a.mp4", b"")),
    "a text": (["can't be read"], lambda t: write(t / "a.mp4", b"hello\n" * 99)),
    "a text called gif": (["can't be read"], lambda t: write(t / "a.gif", b"hello\n" * 99)),
    "cut mp4 without index": (["can't be read"], lambda t: cut(write_video(t / "a.mp4"), 0.5)),
    "cut mp4 with index": (["video"], lambda t: cut(write_video(t / "a.mp4", movflags="faststart"), 0.7)),
    "cut mkv": (["cut off", "frames"], lambda t: cut(write_video(t / "a.mkv"), 0.6)),
    "cut gif": (["video"], lambda t: cut(write_animation(t / "a.gif", [125] * 24), 0.5)),
    "cut webp": (["video"], lambda t: cut(write_animation(t / "a.webp", [125] * 24), 0.5)),
    "sound alone": (["no pictures"], lambda t: write_sound(t / "a.wav")),
    "no length": (["no frames", "how long"], lambda t: raw_stream(write_video(t / "a.mp4"))),
    "a folder": (["can't be read"], lambda t: str(t)),
    "no frames in the list": (["no frames"], lambda t: []),
    "sizes differ": (["64 x 64", "32 x 32"], lambda t: write_frames(t, [0]) + write_frames(t, [1], size=32)),
    "a frame is missing": (["nope.png"], lambda t: [*write_frames(t, [0]), "nope.png"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_video(name, argv, tmp_path, folder, capfd):
    words, make = BAD[name]
    video = make(tmp_path)
    good = [[*write_frames(tmp_path, [0, 1])]] if isinstance(video, list) else [str(folder / "ball.mp4")]
    rows = [{"prompt": "what?", "answer": "a", "videos": videos} for videos in (good, [video])]
    with pytest.raises(SystemExit) as stopped:
        ppo_vl.main(ppo_vl.parse_args(argv(dataset=write_jsonl(tmp_path / "data.jsonl", rows), eval_dataset=None)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["row 1", *words])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_rate_must_be_positive(script, argv, capfd):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args(argv(script, video_fps=0)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, ["--video-fps", "greater than 0"])
