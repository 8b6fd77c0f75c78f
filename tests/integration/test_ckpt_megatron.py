"""Megatron-core's GPT saved and loaded under any tensor and pipeline parallelism, bit by bit."""

import pytest
import torch
import torch.distributed as dist

from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.loading.slices import SliceReader
from tests import thin
from tests.integration import ckpt_engine as engine
from tests.integration.ckpt_forks import run_ranks
from tests.integration.ckpt_layouts import bits, fill_moments
from tests.integration.megatron_model import Layout, build, forward
from tests.unit.checkpoint.written import stored

DEGREES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
"""Of 1, 2 and 4 those whose product is at most 8 ranks; the rest of the ranks are replicas."""
OPTIONS = {"bias": True, "qk_norm": True}


def preload():
    """Import megatron-core, which takes long, before ranks are forked."""
    from megatron.core.models.gpt import GPTModel  # noqa: F401


def optimizer_of(model, lr=1.0):
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def named(model, optimizer):
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return found


def poisoned(model, optimizer):
    """Make every value wrong, and the optimizer like one that never stepped."""
    optimizer.state.clear()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for group in optimizer.param_groups:
        group["lr"] = -1.0


def reference(layout):
    model = build(layout, seed=1, **OPTIONS)
    optimizer = optimizer_of(model, lr=0.25)
    fill_moments(optimizer, seed=5)
    return model, optimizer


def scenario_matrix(rank, size, folder, *, every):
    layouts = [Layout(tp, pp) for tp, pp in DEGREES]
    model, optimizer = reference(layouts[0])
    wanted = [bits(layout.use().cut(named(model, optimizer))) for layout in layouts]
    layouts[0].use()
    first = f"file://{folder}/first"
    engine.save(first, {"model": model, "optimizer": optimizer}, "megatron")
    built = [build(layout, seed=2, **OPTIONS) for layout in layouts]
    states = [{"model": model, "optimizer": optimizer_of(model)} for model in built]
    compared = 0

    def load(place, index):
        layouts[index].use()
        poisoned(*states[index].values())
        engine.load(place, states[index], "megatron")
        found = bits(named(*states[index].values()))
        assert set(found) == set(wanted[index])
        assert [n for n in found if found[n] != wanted[index][n]] == [], (rank, DEGREES[index])
        groups = states[index]["optimizer"].param_groups
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.25, 0.5), (0.25, 0.0)]
        return len(found)

    for source, layout in enumerate(layouts):
        load(first, source)
        layout.use()
        engine.save(f"file://{folder}/{source}", states[source], "megatron")
        for target in range(-source % every, len(layouts), every):
            compared += load(f"file://{folder}/{source}", target)
    return compared


@pytest.mark.slow
def test_every_degree_loads_what_every_degree_saved_bit_by_bit(tmp_path):
    run = "tests.integration.test_ckpt_megatron:scenario_matrix"
    compared = run_ranks(run, 8, tmp_path, timeout=600, every=1 if thin.full else 3)
    wanted = (6_144, 49_920) if thin.full else (2_076, 16_848)
    assert (min(compared), sum(compared)) == wanted


def scenario_padding(rank, size, folder):
    """Vocabularies padded for other numbers of ranks; tied embeddings on two stages."""
    wide, narrow = Layout(2, 2), Layout(4, 1)
    model = build(wide, seed=1, vocab=56, tied=True)
    optimizer = optimizer_of(model)
    fill_moments(optimizer, seed=5)
    for parameter in model.parameters():  # Replicas of tied weights must have equal moments.
        if parameter.shape == (28, 32):
            torch.manual_seed(rank % 2)
            optimizer.state[parameter]["exp_avg"] = torch.randn(28, 32)
            optimizer.state[parameter]["exp_avg_sq"] = torch.rand(28, 32)
    wide.use()
    place = f"file://{folder}/padded"
    engine.save(place, {"model": model, "optimizer": optimizer}, "megatron")
    whole = whole_rows(place, "model", "embedding.word_embeddings.weight")
    moment = whole_rows(place, "optim", "embedding.word_embeddings.weight.exp_avg")
    assert whole.shape == (56, 32)
    facts = []
    for vocab in (64, 52):
        other = build(narrow, seed=2, vocab=vocab, tied=True)
        second = optimizer_of(other)
        poisoned(other, second)
        narrow.use()
        engine.load(place, {"model": other, "optimizer": second}, "megatron")
        weight = other.embedding.word_embeddings.weight
        rows = vocab // 4
        for found, source in ((weight, whole), (second.state[weight]["exp_avg"], moment)):
            expected = torch.zeros(rows, 32)
            part = source[rank * rows : (rank + 1) * rows]
            expected[: len(part)] = part
            assert torch.equal(found, expected), (rank, vocab)
        facts.append(len(part))
    return facts


def whole_rows(place, kind, name):
    reader = SliceReader(open_state(place))
    return torch.from_numpy(reader.read(stored(reader, name, kind=kind)).view("f4"))


@pytest.mark.slow
def test_a_vocabulary_padded_for_other_ranks_keeps_its_rows_and_zeroes_the_rest(tmp_path):
    run = "tests.integration.test_ckpt_megatron:scenario_padding"
    found = run_ranks(run, 4, tmp_path, timeout=200)
    assert found == [[16, 13], [16, 13], [16, 13], [8, 13]]


TOKENS = torch.arange(24).view(2, 12) * 7 % 50


def scenario_train(rank, size, folder, family):
    """Train with tp=2, save by the engine, keep the logits."""
    layout = Layout(2, 1)
    model = build(layout, seed=3, vocab=64, **FAMILIES[family][1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        logits = forward(layout, model, (TOKENS + step) % 50)
        logits.float().log_softmax(-1)[..., 1].mean().backward()
        for name, parameter in model.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:  # Each rank has some of the heads.
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    layout.use()
    engine.save(f"file://{folder}/state", {"model": model, "optimizer": optimizer}, "megatron")
    logits = forward(layout, model, TOKENS).detach()
    torch.save(logits, folder / f"logits-{rank}.pt")
    return list(logits.shape)


def scenario_single(rank, size, folder, family):
    """Load with tp=1, keep the logits."""
    layout = Layout(1, 1)
    model = build(layout, seed=4, vocab=64, **FAMILIES[family][1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout.use()
    engine.load(f"file://{folder}/state", {"model": model, "optimizer": optimizer}, "megatron")
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
    logits = forward(layout, model, TOKENS).detach()
    torch.save(logits, folder / "logits-single.pt")
    return float((logits - torch.load(folder / "logits-0.pt")).abs().max())


FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"bias": True}),
    "qwen3": ("Qwen3Config", {"qk_norm": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_tensor_parallel_ranks_one_and_hugging_face_have_equal_logits(tmp_path, family):
    import transformers

    from planish.checkpoint.convert.export_hf import export

    here = "tests.integration.test_ckpt_megatron"
    run_ranks(f"{here}:scenario_train", 2, tmp_path, timeout=200, family=family)
    (difference,) = run_ranks(f"{here}:scenario_single", 1, tmp_path, timeout=200, family=family)
    assert difference < 1e-5
    config = getattr(transformers, FAMILIES[family][0])(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=8,
        num_key_value_heads=4, head_dim=4, vocab_size=50, rms_norm_eps=1e-6, rope_theta=10000.0,
        tie_word_embeddings=False, max_position_embeddings=16,
    )  # fmt: skip
    source, out = tmp_path / "config", tmp_path / "model"
    config.save_pretrained(source)
    export(f"file://{tmp_path}/state", f"file://{out}", folder=source)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS).logits
    expected = torch.load(tmp_path / "logits-0.pt")[..., :50]
    assert found.shape == expected.shape == (2, 12, 50)
    assert float((found - expected).abs().max()) < 1e-5
    assert float(expected.abs().max()) > 0.05
    assert not dist.is_initialized()
