"""Memory of one device for training and rollout, in bytes, from settings and model sizes.

The counts assume the largest micro-batch that the settings allow. They leave out the memory of
kernels, NCCL and the allocator, for which each GPU has a reserve. All functions take the sections
of a configuration and the sizes of the policy, and assume that a critic has the same sizes.

Source: ZeRO, arXiv 1910.02054, section 3.1 (16 bytes of state a parameter in mixed precision, here
with float32 gradients); Korthikanti et al., arXiv 2205.05198, section 4 (activations of a layer by
counting what its operations keep for the backward pass, and recomputation from the layer's input),
adapted to grouped heads, gated feed-forward layers, root-mean-square norms in float32 and
attention that keeps no scores (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from planish.engines import APART
from planish.models.shapes import ModelShape

Config = SimpleNamespace
"""The sections of a configuration by name, of `planish.base.config.parse_settings`."""

LOGIT_CHUNK = {"cpu": 1024, "cuda": 8192}
"""Tokens whose logits exist at once: `planish.models.logprobs.TOKENS_PER_CHUNK`."""
LOGIT_BYTES = 8
"""Bytes of each logit with its gradient; a temperature other than 1 makes a copy of both. Sums of
bfloat16 products add a gradient in bfloat16."""
DRAWN_LOGIT_BYTES = 32
"""Bytes of each logit in the sampler of `transformers`: in the model's type, in float32, as
log-probability, as probability, and two float64 values of the cumulative sum."""
CACHE_STEP = 64
"""Rows of its KV cache are padded to a multiple of this many tokens: `ROW_STEP` of `kv_cache`."""
BATCH_TOKENS = 8192
"""Tokens of one forward pass of vLLM if `engine.batch_tokens` is 0; twice as many on devices of
70 GiB or more."""
SAMPLER_BYTES = 24
"""Bytes of each logit in vLLM's sampler: float32 logits and log-probabilities, and their sorted
copies with indices."""

BATCH_BYTES = {False: 76, True: 104}
"""Bytes per token of the rollout batch while advantages are computed, without and with a critic:
tokens, masks, log-probabilities, values, returns and temporary tensors of metrics (measured: up
to 73 and 103)."""
SCORE_BYTES = 8
"""Bytes per pair of tokens and head: capped score and softmax weight in float32; in bfloat16 a
second softmax weight replaces half of the score."""
RECORD_BYTES = 20
"""Bytes per token of the rollouts as they are read: id, log-probability, version, text."""


@dataclass(frozen=True)
class MemoryPart:
    """One item of a device's memory."""

    name: str
    num_bytes: int
    how: str


@dataclass(frozen=True)
class Sharing:
    """Numbers of training processes over which parameters, gradients and moments are sharded.

    Example:
        >>> Sharing(2, 4, gathers=False).of(100, 60)
        35
    """

    ranks: int
    """Ranks that share the parameters outside of experts."""
    expert_ranks: int
    gathers: bool
    """True if every rank gathers a layer to compute with it, as in FSDP2; else each rank computes
    with its shard."""

    def of(self, parameters: int, experts: int) -> int:
        """Return the parameters per process, of which `experts` are sharded over `expert_ranks`."""
        return (self.expert_ranks * (parameters - experts) + self.ranks * experts) // (
            self.ranks * self.expert_ranks
        )

    def __str__(self) -> str:
        """Return the divisor in words, to follow a count of parameters: ` / 8 ranks`."""
        if self.ranks == self.expert_ranks:
            return f" / {self.ranks} ranks" if self.ranks > 1 else ""
        return f" / {self.ranks} ranks, experts / {self.expert_ranks}"


@dataclass(frozen=True)
class Precision:
    """Bytes per number in a forward pass."""

    product: int
    """Inputs and results of matrix products."""
    stream: int
    casts: int
    """1 if each matrix product makes a copy of its input (autocast), else 0."""
    head: int = 4
    """Gathered embedding and LM head."""
    logit: int = LOGIT_BYTES

    @classmethod
    def of(
        cls, compute_dtype: str, *, gathers: bool, head_dtype: str = "float32", on_cpu: bool = True
    ) -> Precision:
        """Return the precision of a trainer: gathered weights are bfloat16, others use autocast.

        A head of float32 multiplies float32 numbers on the CPU alone.
        """
        if compute_dtype == "float32":
            return cls(4, 4, 0)
        is_wide = head_dtype == "float32"
        logit = LOGIT_BYTES + 2 * (is_wide and not on_cpu)
        if gathers:
            return cls(2, 2, 0, 4 if is_wide and on_cpu else 2, logit)
        return cls(2, 4, 1, logit=logit)


def kept_by_layer(
    shape: ModelShape, precision: Precision, context: int = 1, *, compiled: bool = False
) -> int:
    """Return the bytes per token that one layer keeps for its backward pass.

    With `context` ranks that share the tokens, each keeps its heads for all tokens, at least one
    key-value head, and a second copy of the attention output for its own tokens. A `compiled` layer
    keeps no result of steps between matrix products.

    Example:
        >>> from planish.models.shapes import known_shape
        >>> kept_by_layer(known_shape("Qwen2.5-7B"), Precision.of("bfloat16", gathers=True)) // 1024
        220
    """
    width, heads = shape.hidden_size, shape.q_size + shape.kv_size
    repeated = shape.kv_size * (max(1, context // shape.num_kv_heads) - 1)
    wide, stream = precision.product, precision.stream
    # Both norms keep the input in float32, the normalised input and a scale; matrix products keep
    # the norms' results. Under autocast each product keeps a copy of its input instead.
    norms = 2 * ((4 + stream) * width + 4)
    inputs = (5 * wide * precision.casts or 2 * wide) * width
    # Rotated queries, keys, values, attention output, and the log-sum-exp of each head.
    attention = 2 * wide * (heads + repeated) + 4 * shape.num_heads
    attention += wide * shape.q_size if context > 1 else 0
    if shape.has_qk_norm:
        attention += (4 * (not compiled) + wide) * heads
        attention += 4 * (shape.num_heads + shape.num_kv_heads)
    if compiled:
        # Input and output of attention, and the scales of both norms; gate and up.
        residual = (stream + wide) * width + 8
        return residual + attention + 2 * wide * shape.intermediate_size
    # Gate, activated gate, up, and their product.
    feed_forward = 4 * wide * shape.intermediate_size * shape.experts_per_token
    return norms + inputs + attention + feed_forward


def scores_of_layer(shape: ModelShape, columns: int) -> int:
    """Return the bytes per token of the attention scores that a layer keeps, with `columns` keys.

    Only eager attention, as for capped scores, keeps them: capped score and softmax weight.
    """
    return SCORE_BYTES * shape.num_heads * columns * shape.keeps_scores


def state_parts(config: Config, shape: ModelShape, sharing: Sharing) -> list[MemoryPart]:
    """Return weights, moments and gradients of one training process, on the device or offloaded."""
    policy, critic = shape.parameters, critic_parameters(config, shape)
    experts, models = shape.expert_parameters, 2 if critic else 1
    trained, largest = policy + critic, max(policy, critic)
    of = f"{trained:,} parameters of policy{' and critic' if critic else ''}"
    weights = sharing.of(4 * trained, 4 * models * experts)
    if rank := config.model.lora_rank:
        # The upper bound: adapters on every matrix of every layer.
        largest = rank * shape.layers * shape.adapter_rows
        trained, experts = largest * models, 0
    gradients = sharing.of(4 * largest, 4 * experts)
    moments = sharing.of(8 * trained, 8 * models * experts)
    alone = ", one model at a time" * bool(critic)
    return [
        MemoryPart("weights, float32 masters", weights, f"4 B x {of}{sharing}"),
        MemoryPart("AdamW moments, float32", moments, f"8 B x {trained:,}{sharing}"),
        MemoryPart("gradients, float32", gradients, f"4 B x {largest:,}{sharing}{alone}"),
    ]


def tokens_of_rank(config: Config) -> int:
    """Return the tokens per rank of the largest micro-batch."""
    train, rollout = config.train, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    own: int = -(-longest // train.context_parallel)
    return max(own, int(train.tokens_per_microbatch))


def train_parts(
    config: Config, shape: ModelShape, sharing: Sharing, *, on_cpu: bool
) -> list[MemoryPart]:
    """Return the memory of one training process on its device at the peak of a step."""
    train, rollout = config.train, config.rollout
    precision = Precision.of(
        train.compute_dtype,
        gathers=sharing.gathers,
        head_dtype=config.model.head_dtype,
        on_cpu=on_cpu,
    )
    held = state_parts(config, shape, sharing)
    if train.offload:
        # Gradients of a replica stay on the device until the all-reduce between replicas.
        sums = replace(held[2], name="gradients until groups add them up")
        held = [sums] if train.replicas > 1 else []
    tokens = tokens_of_rank(config)
    # With sequence parallelism each rank keeps its part of a layer (Korthikanti et al., eq. 4).
    parts_of_tokens = train.tensor_parallel if train.sequence_parallel else 1
    is_compiled = train.compile and train.trainer == "fsdp2" and train.context_parallel == 1
    is_compiled = is_compiled and not shape.num_experts
    each = layer = kept_by_layer(shape, precision, train.context_parallel, compiled=is_compiled)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    each = layer = layer // parts_of_tokens + scores_of_layer(shape, longest)
    why, again = "no checkpointing", 0
    if train.activation_checkpointing:
        each = precision.stream * shape.hidden_size // parts_of_tokens
        why, again = "their inputs", tokens * layer
    how = f"{tokens:,} tokens x {shape.layers} layers x {each:,} B, {why}"
    busiest = [
        logits_moment(shape, precision, sharing, tokens, rollout.temperature, on_cpu=on_cpu),
        layer_moment(shape, precision, sharing, again, tokens),
    ]
    return [
        *held,
        MemoryPart("activations kept", tokens * shape.layers * each, how),
        max(busiest, key=lambda part: part.num_bytes),
    ]


def batch_part(config: Config, groups: int) -> MemoryPart:
    """Return the host memory of the rollout batch in one training process.

    The process reads all rollouts, and builds the rows of its data-parallel group, one of `groups`,
    padded to the longest row.
    """
    rollout, has_critic = config.rollout, hasattr(config.algorithm, "lambda_critic")
    rows = rollout.prompts_per_iteration * rollout.group_size
    columns = rollout.max_prompt_tokens + rollout.max_response_tokens
    each = BATCH_BYTES[has_critic] + 4 * bool(config.algorithm.kl_coefficient)
    own = -(-rows // groups)
    how = f"up to {columns:,} tokens x ({own:,} x {each} B + {rows:,} rollouts x {RECORD_BYTES} B)"
    return MemoryPart("rollout batch", columns * (own * each + rows * RECORD_BYTES), how)


def critic_parameters(config: Config, shape: ModelShape) -> int:
    """Return the number of parameters of the critic; 0 for algorithms without `lambda_critic`."""
    return shape.body_parameters if hasattr(config.algorithm, "lambda_critic") else 0


def cold_start_parts(
    config: Config, shape: ModelShape, room_bytes: int, *, on_cpu: bool
) -> list[MemoryPart]:
    """Return the memory of the cold start on one device, including its engine for measurements.

    One process trains in float32 without checkpointing of activations. The arguments are those of
    `engine_parts`.
    """
    sft, rank = config.sft, config.model.lora_rank
    # A model built from scratch trains all of its weights, without adapters.
    has_adapters = rank and config.model.path
    trained = rank * shape.layers * shape.adapter_rows if has_adapters else shape.parameters
    longest = config.rollout.max_prompt_tokens + sft.max_response_tokens
    tokens = sft.traces_per_minibatch * longest
    alone, precision = Sharing(1, 1, gathers=False), Precision(4, 4, 0)
    layer = kept_by_layer(shape, precision) + scores_of_layer(shape, longest)
    how = f"{sft.traces_per_minibatch} traces x {longest:,} tokens x {shape.layers} layers x "
    busiest = [
        logits_moment(shape, precision, alone, tokens, on_cpu=on_cpu),
        layer_moment(shape, precision, alone, 0, tokens),
    ]
    probed = with_share(config, sft.probe_memory_share) if config.engine.name == "vllm" else config
    probe = engine_parts(probed, shape, "sft", room_bytes, on_cpu=on_cpu)
    names = ", ".join(part.name for part in probe)
    return [
        MemoryPart("weights, float32", 4 * shape.parameters, f"4 B x {shape.parameters:,}"),
        MemoryPart("AdamW moments and gradients", 12 * trained, f"12 B x {trained:,}"),
        MemoryPart(
            "activations kept",
            tokens * shape.layers * layer,
            f"{how}{layer:,} B; longer traces take more",
        ),
        max(busiest, key=lambda part: part.num_bytes),
        MemoryPart("engine that measures", sum(part.num_bytes for part in probe), names),
    ]


def with_share(config: Config, share: float) -> Config:
    """Return a configuration with another `engine.memory_share`."""
    engine = config.engine.model_copy(update={"memory_share": share})
    return SimpleNamespace(**{**vars(config), "engine": engine})


def _gathered_outer(shape: ModelShape, precision: Precision) -> int:
    """Return the bytes of gathered embedding and LM head, and of the head's gradient.

    FSDP2 keeps them gathered from the forward pass to the end of the backward pass.
    """
    outside = shape.parameters - shape.layers * shape.layer_parameters
    return precision.head * outside + 4 * shape.embedding_parameters


def logits_moment(
    shape: ModelShape,
    precision: Precision,
    sharing: Sharing,
    tokens: int,
    temperature: float = 1.0,
    *,
    on_cpu: bool,
) -> MemoryPart:
    """Return the memory of the LM head while it scores a chunk of the tokens."""
    chunk = min(tokens, LOGIT_CHUNK["cpu" if on_cpu else "cuda"])
    each = precision.logit * (1 if temperature == 1.0 else 2)
    logits = each * chunk * shape.vocab_size
    how = f"{chunk:,} tokens x {shape.vocab_size:,} logits x {each} B"
    copies = 0
    if sharing.gathers:
        copies = _gathered_outer(shape, precision)
        how += ", gathered embedding, head and its gradient"
    elif precision.casts:
        # Autocast keeps its copies of the weights until the forward pass ends.
        copied = shape.layers * shape.layer_parameters + shape.embedding_parameters
        copies = precision.product * sharing.of(copied, shape.expert_parameters)
        how += ", bfloat16 copies of the weights"
    return MemoryPart("busiest moment: LM head", logits + copies, how)


def layer_moment(
    shape: ModelShape, precision: Precision, sharing: Sharing, again: int, tokens: int
) -> MemoryPart:
    """Return the memory of the backward pass of one layer for the tokens of a micro-batch.

    `again` is the number of bytes of recomputed activations; 0 without checkpointing.
    """
    wide = precision.product
    # Gradients of two feed-forward activations, and of the residual stream before and after.
    feed_forward = 2 * wide * shape.intermediate_size * shape.experts_per_token
    flow = tokens * (feed_forward + 2 * precision.stream * shape.hidden_size)
    how = f"one layer of {tokens:,} tokens{' again' if again else ''} and its gradients"
    copies = 0
    if sharing.gathers:
        # Two gathered layers, the receive buffer of a third, and gradients in both types.
        copies = (4 * wide + 8) * shape.layer_parameters
        copies += _gathered_outer(shape, precision)
        how += ", weights gathered"
    elif precision.casts:
        checkpointed = 1 if again else shape.layers
        copied = checkpointed * shape.layer_parameters + shape.embedding_parameters
        experts = checkpointed * shape.expert_parameters // shape.layers
        copies = wide * sharing.of(copied, experts)
        how += ", bfloat16 copies of its weights"
    return MemoryPart("busiest moment: a layer", again + flow + copies, how)


def engine_parts(
    config: Config, shape: ModelShape, section: str, room_bytes: int, *, on_cpu: bool
) -> list[MemoryPart]:
    """Return the memory of the engine of `section` on one device; the KV cache is the last part.

    For engines with separate attention and expert ranks the device is that of an attention rank,
    which has all data of its rows; `expert_rank_part` is for the others. `room_bytes` is the
    memory of the device, or of the host with `on_cpu`.
    """
    engine, settings = config.engine, getattr(config, section)
    name, ranks = engine.name, engine.tensor_parallel
    wide = bytes_per_weight(config)
    in_type = 1 if engine.quantization == "fp8" else wide
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    rows, cached = settings.max_rows, shape.kv_bytes_per_token(wide) // ranks
    held = shape.parameters
    if name in APART:
        held -= shape.expert_parameters
        shared = f" outside of experts{read_at_start(config, in_type * held)}"
        rows = -(-rows // config.engine.attention_ranks)
    longest = config.rollout.max_prompt_tokens + settings.max_response_tokens
    limit = min(longest, shape.max_model_tokens)
    how = f"{in_type} B x {held:,} parameters{shared}"
    weights = MemoryPart("weights", in_type * held // ranks, how)
    logits = f"{rows} rows x {shape.vocab_size:,} logits x"
    if not name.startswith("vllm"):
        drawn = DRAWN_LOGIT_BYTES * rows * shape.vocab_size
        wide_rows = -(-limit // CACHE_STEP) * CACHE_STEP
        how = f"{rows} rows x {wide_rows:,} tokens x {cached:,} B"
        prompt = config.rollout.max_prompt_tokens
        scores = rows * prompt * scores_of_layer(shape, prompt)
        how_scored = f"{rows} rows x {prompt:,} x {prompt:,} pairs of tokens"
        return [
            weights,
            *[MemoryPart("scores of attention in prompts", scores, how_scored)] * bool(scores),
            MemoryPart("logits of a step", drawn, f"{logits} {DRAWN_LOGIT_BYTES} B"),
            MemoryPart("keys and values", rows * wide_rows * cached, how),
        ]
    at_once = engine.batch_tokens or BATCH_TOKENS * (1 + (room_bytes >= 70 << 30))
    forward = 8 * shape.hidden_size + 6 * shape.intermediate_size * shape.experts_per_token
    step = MemoryPart(
        "forward pass and sampler",
        at_once * forward * wide // 2 + SAMPLER_BYTES * rows * shape.vocab_size,
        f"{at_once:,} tokens x {forward:,} B and {logits} {SAMPLER_BYTES} B",
    )
    # An evaluation does not limit its prompts: vLLM must have room for the longest context.
    least = cached * (limit if section == "rollout" else shape.max_model_tokens)
    left = int(config.engine.memory_share * room_bytes) - weights.num_bytes - step.num_bytes
    cache = engine.cache_bytes or (1 << 30 if on_cpu else max(left, least))
    how = (
        f"{cache // cached:,} tokens x {cached:,} B, room for {cache / cached / limit:.1f} of the "
        f"longest responses at once (`{section}.max_rows` = {rows})"
    )
    return [weights, step, MemoryPart("keys and values", max(cache, least), how)]


def bytes_per_weight(config: Config) -> int:
    """Return the bytes per weight of the policy in an engine."""
    return 2 if config.model.dtype == "bfloat16" else 4


def expert_rank_part(config: Config, shape: ModelShape) -> MemoryPart:
    """Return the weights on an expert rank of an engine with separate attention and experts."""
    wide, engine = bytes_per_weight(config), config.engine
    each = shape.expert_parameters // max(1, shape.num_experts)
    count = shape.num_experts // engine.expert_ranks + engine.redundant_experts
    how = f"{count} experts of {shape.layers} layers x {wide} B x {each // shape.layers:,}"
    size = wide * each * count
    return MemoryPart("weights of experts", size, how + read_at_start(config, size))


def read_at_start(config: Config, num_bytes: int) -> str:
    """Return, in words, the read rate a rank needs to load its weights before the time-out."""
    seconds = config.engine.start_seconds
    rate = num_bytes / seconds / 1e9
    return f", read at {rate:.2g} GB/s or more (`engine.rank_timeout_seconds` allows {seconds:g} s)"


def frames_part(config: Config, shape: ModelShape, section: str, peers: int) -> MemoryPart:
    """Return the memory of frames (rows to and from the other role) on a rank's device.

    For each of `peers` and each micro-batch, the rank has one buffer for the largest sent frame and
    one for the largest received frame. A token sends at most one row per expert on the peer.
    """
    wide, engine = bytes_per_weight(config), config.engine
    slots = engine.micro_batches if engine.name == "disagg" else 1
    rows = -(-getattr(config, section).max_rows // (engine.attention_ranks * slots))
    tokens = max(rows, engine.frame_tokens)
    local = shape.num_experts // engine.expert_ranks + engine.redundant_experts
    each = tokens * min(shape.experts_per_token, local) * shape.hidden_size * wide
    how = f"2 x {peers} ranks x {slots} micro-batches x {each:,} B of {tokens:,} tokens"
    return MemoryPart("rows on their way", 2 * peers * slots * each, how)
