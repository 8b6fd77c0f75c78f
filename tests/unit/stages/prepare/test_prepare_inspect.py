"""What prepare finds when it opens data and model: everything wrong is told before a GPU is."""

import json
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.errors import ConfigError
from planish.engines.architectures import window_fault
from planish.models.config import ModelConfig
from planish.models.experts import on_disk
from planish.models.inspect import built_tensors
from planish.models.policy import build_policy, save_policy
from planish.stages.prepare.inspect import inspect_sources

TINY = ModelConfig(num_layers=1, hidden_size=16, intermediate_size=24, head_dim=8, dtype="bfloat16")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspected") / "model"
    policy = build_policy(TINY, seed=2)
    save_policy(f"file://{folder}", policy, version=0, parents={}, attributes={})
    (folder / "manifest.json").unlink()
    return folder


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def inspect(
    dataset="", path="", *, engine="transformers", limit=64, seconds=60.0, functions=(), **curate
):
    config = {
        "curate": {"dataset": str(dataset), **curate},
        "model": {"path": str(path)},
        "engine": {"name": engine},
        "rollout": {"max_prompt_tokens": limit},
        "reward": {"verifier_timeout_seconds": seconds, "functions": functions},
    }
    return inspect_sources(config)


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        inspect(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jsonl(tmp_path, *rows):
    path = tmp_path / "mine.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def sums(count, **more):
    return [{"question": f"{n}+1=", "label": n + 1, **more} for n in range(count)]


MAP = "prompt=question,answer=label"


def test_data_and_model_are_told_in_a_short_table(tmp_path, model):
    rows = [*sums(5, verifier="trace", system="be brief."), {"question": "?", "label": "1/2"}]
    path = jsonl(tmp_path, *rows, {"question": "5+5="})
    found = inspect(path, model, dataset_map=MAP, prompt_prefix="", prompt_suffix="")
    table = dict(found.rows)
    assert table["data"] == f"`{path}`, 7 rows"
    assert table["- columns"] == (
        "`question` text, `label` number 5, text 1, nothing 1, `verifier` text 5, nothing 2, "
        "`system` text 5, nothing 2"
    )
    assert table["- no_answer"] == "1 rows (line 7)"
    assert table["- verifiers"] == "`trace` 5, `math` 1"
    assert table["- system message"] == "in 5 of 6 prompts"
    assert table["- worked traces"] == "in 0 of 6 rows"
    assert table["model"] == f"`{model}`, `Qwen3ForCausalLM`"
    count = sum(p.numel() for p in build_policy(TINY, 2).model.parameters())
    size = (model / "model.safetensors").stat().st_size
    assert table["- size"] == f"{count:,} parameters, {size / 1024:.1f} KiB of BF16"
    assert table["- tokenizer"] == f"{TINY.vocab_size} tokens, chat template, ends with `2`"
    # <bos>, `be brief.` and `0+1=`
    assert table["- prompts"] == "median 14 tokens, longest 14"
    assert found.warnings == []


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_image_of_prepare_needs_no_torch(tmp_path, model, engine):
    """The same is found in a process that has none; with adapters, which are counted."""
    path = jsonl(tmp_path, *sums(3, verifier="trace"))
    config = {
        "curate": {"dataset": str(path), "dataset_map": MAP},
        "model": {"path": str(model), "lora_rank": 2},
        "engine": {"name": engine},
        "rollout": {"max_prompt_tokens": 64},
    }
    code = (
        "import json, sys; sys.modules['torch'] = None\n"
        "from planish.stages.prepare.inspect import inspect_sources\n"
        f"found = inspect_sources({config!r})\n"
        "print(json.dumps([found.rows, found.warnings]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = inspect_sources(config)
    assert json.loads(done.stdout) == [[list(row) for row in here.rows], here.warnings]


def test_parameters_that_adapters_train_are_told_against_all(tmp_path, model):
    path = jsonl(tmp_path, *sums(2, verifier="trace"))
    count = sum(p.numel() for p in build_policy(TINY, 2).model.parameters())
    config = {"curate": {"dataset": str(path), "dataset_map": MAP}}
    adapters = {"lora_rank": 2, "lora_target_modules": ["q_proj", "down_proj"]}
    for settings in ({"path": str(model)}, TINY.model_dump()):
        found = inspect_sources({**config, "model": {**settings, **adapters}})
        # Two heads of eight from sixteen, and sixteen from twenty-four.
        trained = 2 * (16 + 16) + 2 * (16 + 24)
        assert dict(found.rows)["- adapters"] == (
            f"rank 2, alpha 32, on `down_proj`, `q_proj`: {trained} of {count + trained:,} "
            f"parameters are trained ({100 * trained / (count + trained):.2g} %)"
        )
        adapters["lora_target_modules"][0] = "c_attn"
        with pytest.raises(ConfigError, match=r"linear layers .*got \['c_attn'\]"):
            inspect_sources({**config, "model": {**settings, **adapters}})
        adapters["lora_target_modules"][0] = "q_proj"


def with_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"max_position_embeddings": 40}, 40),
        ({"max_position_embeddings": 256, "rope_parameters": LONGROPE}, 40),
        (
            {
                "max_position_embeddings": 256,
                "original_max_position_embeddings": 40,
                "rope_parameters": None,
                "rope_scaling": {"type": "longrope"},
            },
            40,
        ),
    ],
)
def test_responses_that_do_not_fit_behind_the_prompts_are_refused(tmp_path, model, changes, limit):
    path = jsonl(tmp_path, *sums(5, verifier="trace"))
    config = {
        "curate": {"dataset": str(path), "dataset_map": MAP},
        "model": {"path": str(with_config(model, **changes))},
    }
    longest = max(
        int(value.rpartition(" ")[2])
        for name, value in inspect_sources(config).rows
        if name == "- prompts"
    )
    for stage in ("rollout", "evaluate"):
        fits = {stage: {"max_response_tokens": limit - longest}}
        inspect_sources(config | fits)
        config_over = config | {stage: {"max_response_tokens": limit - longest + 1}}
        with pytest.raises(ConfigError) as caught:
            inspect_sources(config_over)
        assert f"fit in the model's {limit} tokens, got {longest} + `{stage}." in str(caught.value)
        assert ("rotary scaling" in str(caught.value)) == ("rope_parameters" in changes)


def test_experts_that_no_policy_could_be_saved_of_are_refused(tmp_path):
    folder = tmp_path / "moe"
    moe = ModelConfig(**TINY.model_dump() | {"num_experts": 4})
    policy = build_policy(moe, seed=2)
    save_policy(f"file://{folder}", policy, version=0, parents={}, attributes={})
    path = jsonl(tmp_path, *sums(3, verifier="trace"))
    inspect(path, folder, dataset_map=MAP)
    for kind in ("olmoe", "gpt_oss"):
        message = refused(path, with_config(folder, model_type=kind), dataset_map=MAP)
        assert f"got the `model_type` '{kind}'; choose another model" in message


def test_a_built_model_has_the_tensors_that_are_counted_for_it():
    for changes in ({}, {"num_experts": 4}):
        settings = ModelConfig(num_layers=2, **changes)
        model = build_policy(settings, 0).model
        tensors = on_disk(dict(model.named_parameters()), model.config.to_dict())
        made = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert {n: shape for n, (_, shape) in built_tensors(settings).items()} == made


def test_the_first_bad_rows_are_told_by_number_all_at_once(tmp_path):
    path = jsonl(tmp_path, *sums(2), "{", "[1]", *sums(1), "x", "")
    message = refused(path, dataset_map=MAP)
    assert "3 of 6 rows can not be read: line 3: not JSON" in message
    assert "line 4: a row must be an object, got [1]" in message
    found = inspect(path, dataset_map=MAP, skip_bad=True)
    assert "3 of 6 rows can not be read" in found.warnings[0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "must hold at least one readable row"),
        ([{"q": "1+1=", "a": "2"}], "must name columns of the data set, got prompt='question'"),
        ([*sums(2), {"question": 7, "label": 8}], "line 3 (prompt_is_no_text)"),
        ([*sums(2), {"question": "x", "label": {"n": 8}}], "line 3 (answer_is_no_text)"),
        (sums(2, verifier="nonsense"), "got none in 2 rows (unknown_verifier 2)"),
    ],
)
def test_data_that_nothing_can_be_learnt_from_is_refused(tmp_path, rows, words):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert words in refused(path, dataset_map=MAP)


@pytest.fixture
def first_500(monkeypatch):
    """Let the rows behind the first 500 be read as those behind the first 5000 are."""
    monkeypatch.setattr("planish.stages.curate.inspect.INSPECTED_ROWS", 500)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "1 of 601 rows can not be read: line 600: not JSON"),
        ('"x"', "line 600: a row must be an object, got 'x'"),
        ('{"question": 7, "label": 8}', "1 of 601 rows with another type: line 600 (prompt_is"),
        ('{"question": "x", "label": {"n": 8}}', "line 600 (answer_is_no_text)"),
    ],
)
def test_a_bad_row_far_down_a_file_is_told(tmp_path, first_500, bad, words):
    rows = [*sums(1, id="a"), *sums(598), bad, *sums(1)]
    path = jsonl(tmp_path, *rows)
    assert words in refused(path, dataset_map=MAP)
    found = inspect(path, dataset_map=MAP, skip_bad=True)
    shown = dict(found.rows)
    assert shown["data"] == f"`{path}`, 601 rows; what follows is of the first 500"
    assert shown["- verifiers"] == "`integer` 500"


def test_rows_far_down_a_file_that_lack_an_answer_are_counted(tmp_path, first_500):
    gap = {"question": "?"}
    found = inspect(jsonl(tmp_path, gap, *sums(550), *[gap] * 5), dataset_map=MAP)
    assert dict(found.rows)["- no_answer"] == "6 rows (line 1, line 552, line 553, ...)"
    assert found.faults == []
    table = pa.table({"question": ["1+1="] * 600, "label": [*["2"] * 599, None]})
    pq.write_table(table, tmp_path / "mine.parquet")
    found = inspect(tmp_path / "mine.parquet", dataset_map=MAP)
    assert dict(found.rows)["- no_answer"] == "1 rows (row 600)"


def test_a_file_that_takes_too_long_is_left_to_curate(tmp_path, first_500, monkeypatch):
    monkeypatch.setattr("planish.stages.curate.inspect.READING_SECONDS", 0.0)
    found = inspect(jsonl(tmp_path, *sums(1500), "{"), dataset_map=MAP)
    (line,) = (w for w in found.warnings if "read up to" in w)
    number = re.fullmatch(r"the data was read up to line (\d+), as far as .* rest", line)[1]
    assert 501 <= int(number) < 1500
    assert f"{number} rows" in dict(found.rows)["data"]


@pytest.mark.long
def test_the_rows_of_a_long_file_are_not_kept(tmp_path, first_500):
    """Three times the rows, bad ones among them, take no more memory at the peak."""
    text = json.dumps({"question": "1+1=", "label": 2, "text": "x" * 1000})
    peaks = []
    for count in (600, 4000):
        path = jsonl(tmp_path, *[text] * count, *["{"] * (count // 10))
        tracemalloc.start()
        inspect(path, dataset_map=MAP, skip_bad=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1 << 20, peaks


VERIFIERS = """
import math, os, time
from pathlib import Path

def zero(response, answer): return 0.0
def part(response, answer): return 0.25 if response == answer else math.nan
def raises(response, answer): return {"1": 1.0, "2": 1.0}[answer]
def hangs(response, answer): time.sleep(600)
def nan(response, answer): return math.nan
def above(response, answer): return 1.5
def text(response, answer): return "1"
def dies(response, answer): os._exit(3)
def level(response, answer, level): return level
def lost(response, answer, lost): return lost
def fifth(response, answer): return 1.0 if answer in "1234" else None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of verifiers; its name is that of the test, since children outlive one."""
    name = f"of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return name


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "got: {own}:raises raised KeyError: '3', called with the answer of line 3"),
        ("hangs", "{own}:hangs did not answer within 0.5 s, called with the answer of line 1"),
        ("nan", "{own}:nan must return a number from 0 to 1, got nan of type float"),
        ("above", "must return a number from 0 to 1, got 1.5 of type float"),
        ("text", "must return a number from 0 to 1, got '1' of type str"),
        ("dies", "{own}:dies did not survive a call: its process ended, exit code 3"),
    ],
)
def test_a_verifier_that_fails_on_the_first_ground_truths_is_refused(
    tmp_path, own, function, words
):
    path = jsonl(tmp_path, *sums(6))
    seconds = 0.5 if function == "hangs" else 60.0
    message = refused(path, dataset_map=MAP, verifier=f"{own}:{function}", seconds=seconds)
    assert f"the verifier '{own}:{function}' must give a number from 0 to 1" in message
    assert words.format(own=own) in message
    assert message.endswith(f"`planish verifier check {own}:{function}` tries more")


def test_reward_functions_are_tried_with_their_columns_and_lost_columns_are_told(tmp_path, own):
    path = jsonl(tmp_path, *sums(6, verifier="trace", level=0.5))
    functions = [{"name": f"{own}:level", "weight": 0.5}]
    found = inspect(path, dataset_map=MAP, functions=functions, reward_columns=["levle"])
    assert found.faults == []
    told = "reward functions take the column 'levle', which no row has; did you mean `level`?"
    assert any(told in line for line in found.warnings)
    functions = [{"name": f"{own}:lost", "weight": 0.5}]
    assert "takes the column `lost`, which this row does not have" in refused(
        path, dataset_map=MAP, functions=functions
    )


@pytest.mark.parametrize("function", ["zero", "part", "fifth"])
def test_a_verifier_that_gives_numbers_is_no_fault(tmp_path, own, function):
    # The fifth row is not reached: a verifier is called on the first four of its rows.
    path = jsonl(tmp_path, *sums(6))
    found = inspect(path, dataset_map=MAP, verifier=f"{own}:{function}")
    assert f"`{own}:{function}` 6" in dict(found.rows)["- verifiers"]


def test_each_verifier_that_rows_name_is_called_and_its_faults_are_told_together(tmp_path, own):
    names = ["zero", "nan", "above", "nan"]
    rows = [row | {"verifier": f"{own}:{n}"} for row, n in zip(sums(4), names, strict=True)]
    message = refused(jsonl(tmp_path, *rows), dataset_map=MAP)
    assert message.count("must give a number from 0 to 1 for any response") == 2
    assert "called with the answer of line 2" in message
    assert "called with the answer of line 3" in message


def test_prompts_that_the_model_can_not_read_are_told_and_refused_where_none_is_left(
    tmp_path, model
):
    path = jsonl(tmp_path, *[{"prompt": f"What is {n}?", "answer": n} for n in range(3)])
    found = inspect(path, verifier="trace")
    assert "3 of 3 prompts hold characters that the built model does not know" in found.warnings[0]
    assert "['?', 'W']" in found.warnings[0]
    rows = [{"prompt": "1" * n, "answer": 1, "verifier": "trace"} for n in (10, 30)]
    path = jsonl(tmp_path, *rows)
    found = inspect(path, model, limit=20)
    assert "1 of 2 prompts have more than `rollout.max_prompt_tokens` (20)" in found.warnings[0]
    assert "nothing would be left to sample" in refused(path, model, limit=5)


def test_a_file_of_weights_that_was_cut_is_refused(model):
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    message = refused(path=model)
    assert f"must have the {len(data)} bytes that its header says, got {len(data) - 7}" in message
    for cut in (data[:50], data[:4], struct.pack("<Q", 1 << 40) + data[8:], b"\0" * 40):
        path.write_bytes(cut)
        assert f"must be a whole safetensors file, got one of {len(cut)} bytes" in refused(
            path=model
        )
    path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80")
    assert "got only pickled weights ['pytorch_model.bin']" in refused(path=model)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    path.write_bytes(data)
    assert "got none of ['model-00001-of-00002.safetensors']" in refused(path=model)
    (model / "model.safetensors.index.json").unlink()
    (model / "chat_template.jinja").unlink()
    assert "a tokenizer must have a chat template, got none" in refused(path=model)


def test_a_vocabulary_that_does_not_fit_is_refused(model):
    with_config(model, vocab_size=20)
    message = refused(path=model)
    assert f"must know each of the {TINY.vocab_size} tokens of its tokenizer" in message
    assert f"must have 20 rows, `vocab_size` of config.json, got {TINY.vocab_size}" in message


def test_an_architecture_that_trainer_or_engine_do_not_know_is_refused(model):
    assert "whose version of vLLM does not" not in str(inspect(path=model, engine="vllm").warnings)
    assert "takes models with experts of deepseek_v3, mixtral, qwen2_moe" in refused(
        path=model, engine="disagg"
    )
    with_config(model, architectures=["OwnForCausalLM"])
    message = refused(path=model, engine="vllm")
    assert "`architectures` in config.json must name a class of transformers" in message
    assert "`engine.name` must serve OwnForCausalLM, got 'vllm'" in message


MIXED = ["full_attention", "sliding_attention"]
NUMBERED = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"layer_types": MIXED}, True),
        ({"layer_types": MIXED[1:] * 2}, False),
        ({"layer_types": MIXED[:1] * 2, **NUMBERED, "max_window_layers": 1}, False),
        ({"layer_types": None, **NUMBERED, "max_window_layers": 1}, True),
        ({"layer_types": None, **NUMBERED, "max_window_layers": 2}, False),
        ({"layer_types": None, **NUMBERED, "max_window_layers": 0}, False),
        ({"layer_types": None, "sliding_window": 8, "max_window_layers": 1}, False),
        ({"layer_types": MIXED, "architectures": ["Qwen2MoeForCausalLM"]}, True),
        ({"layer_types": MIXED, "architectures": ["MistralForCausalLM"]}, True),
        ({"layer_types": MIXED, "architectures": ["Gemma2ForCausalLM"]}, False),
        ({"text_config": {"layer_types": MIXED}}, True),
    ],
)
def test_windows_in_some_layers_are_refused_with_vllm(changes, is_refused):
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **changes}
    assert bool(window_fault(config)) == is_refused


@pytest.mark.parametrize("engine", ["vllm", "vllm_disagg"])
def test_windows_that_vllm_lacks_are_told_before_a_rollout(model, engine):
    with_config(model, layer_types=MIXED, sliding_window=8, use_sliding_window=True)
    told = "and windows in some layers of Qwen3ForCausalLM, which vLLM lacks; take the engine 'tr"
    assert told in refused(path=model, engine=engine)


def test_each_fault_of_data_and_model_is_told_together(tmp_path):
    message = refused(tmp_path / "none.jsonl", tmp_path / "none")
    assert "`curate.dataset` must be" in message
    assert "`model.path` must be an existing folder" in message


def test_a_changed_model_whose_tokens_are_not_those_of_the_run_is_refused(tmp_path, original):
    policy = f"{tmp_path.as_uri()}/policies/00001"
    build = build_policy(TINY, seed=2)
    ref = save_policy(policy, build, version=1, parents={}, attributes={})
    other = build_policy(ModelConfig(**{**TINY.model_dump(), "alphabet": "0123456789=?"}), seed=2)
    folder = tmp_path / "other"
    save_policy(folder.as_uri(), other, version=0, parents={}, attributes={})

    def go_on(path, changed=("`model.path`: '' -> 'new'",)):
        config = {"curate": {}, "model": {"path": str(path)}, "engine": {}, "rollout": {}}
        return inspect_sources(config, policy=ref.pin(), changed=changed)

    with pytest.raises(ConfigError) as caught:
        go_on(folder)
    count = other.tokenizer.vocab_size
    assert f"must have the {build.tokenizer.vocab_size} tokens" in str(caught.value)
    assert f"got {count}, " in str(caught.value)
    assert "begin a new root" in str(caught.value)
    assert "goes on with its own policy" in go_on(original).warnings[-1]
    assert go_on(folder, changed=()).rows == go_on("").rows
