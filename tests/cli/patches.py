"""Patches that the tests put into engines with `patch=patches:NAME`."""

import os
import signal
import time
from functools import partial
from typing import Any

import torch


def tanh_gelu_in_layer_1(model: Any) -> None:
    """Another activation, and only there."""
    model.model.layers[1].mlp.act_fn = torch.nn.GELU(approximate="tanh")


def training_mode(model: Any) -> None:
    """A trainer that forgot model.eval()."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.05
    model.train()


def larger_epsilon(model: Any) -> None:
    """Norms whose epsilon is not the config's."""
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1e-2


def nan_in_layer_2(model: Any) -> None:
    """One NaN in the first row of every o_proj output."""

    def poison(_module: Any, _inputs: Any, output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).clone()
        value.view(-1)[0] = float("nan")
        return (value, *output[1:]) if isinstance(output, tuple) else value

    model.model.layers[2].self_attn.o_proj.register_forward_hook(poison)


def swap_two_heads(model: Any) -> None:
    """Two q heads swapped in layer 1, as a wrong conversion would."""
    projection = model.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        heads = projection.weight.view(-1, model.config.head_dim, projection.weight.shape[1])
        heads[[0, 1]] = heads[[1, 0]].clone()


def assign_packed_weight(model: Any) -> None:
    """A change that vLLM on the CPU cannot see: it packed the weight away."""
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.data = torch.zeros(layer.output_size, layer.input_size, dtype=torch.bfloat16)


def scale_attention_output(model: Any) -> None:
    """A fault inside vLLM: layer 2's attention core is 1 % too large."""
    _scale_output(model.model.layers[2].self_attn.attn, 1.01)


def _add_noise(module: Any, size: float) -> None:
    """Noise that is another in each run."""
    generator = torch.Generator()
    generator.seed()

    def add(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + size * torch.randn(output.shape, generator=generator).to(output.dtype)

    module.register_forward_hook(add)


def noisy(model: Any) -> None:
    """An engine that does not repeat itself: fresh noise in layer 1's up_proj."""
    _add_noise(model.model.layers[1].mlp.up_proj, 1e-3)


def loud_noise(model: Any) -> None:
    """As `noisy`, ten times as loud and from the first layer on."""
    _add_noise(model.model.layers[0].mlp.up_proj, 1e-2)


def _scale_where_a_token_is_alone(model: Any, factor: float) -> None:
    def scale(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor if output.shape[1] == 1 else output

    model.model.layers[1].self_attn.o_proj.register_forward_hook(scale)


def decode_only_slightly(model: Any) -> None:
    """A fault of decode alone, within the limits: layer 1's o_proj is 2 % too large there."""
    _scale_where_a_token_is_alone(model, 1.02)


def decode_only(model: Any) -> None:
    """The same, 10 %."""
    _scale_where_a_token_is_alone(model, 1.1)


def decode_only_in_vllm(model: Any) -> None:
    """The same in vLLM, 30 %: a step of decode has a row for each of a few sequences."""

    def scale(_module: Any, _inputs: Any, output: Any) -> Any:
        value, *rest = output if isinstance(output, tuple) else (output,)
        if value.shape[0] <= 8:
            value = value * 1.3
        return (value, *rest) if isinstance(output, tuple) else value

    model.model.layers[1].self_attn.o_proj.register_forward_hook(scale)


def ends_the_process(model: Any) -> None:
    raise SystemExit(0)


def ends_the_process_later(model: Any) -> None:
    def end(_module: Any, _inputs: Any) -> None:
        raise SystemExit(0)

    model.model.layers[0].register_forward_pre_hook(end)


def ends_the_process_at_once(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda *_: os._exit(0))


def observed_differs(model: Any) -> None:
    """A model that notices being watched: with hooks on its head, its logits change."""
    head = model.lm_head

    def notice(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.01 if len(head._forward_hooks) > 1 else output

    head.register_forward_hook(notice)


def die_in_prefill(model: Any) -> None:
    """The worker is killed by the system while it scores."""

    def kill(_module: Any, inputs: Any) -> None:
        if inputs[0].shape[1] > 40 and os.path.exists("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[3].register_forward_pre_hook(kill)


def wait_forever(model: Any) -> None:
    """A worker that never comes back by itself."""

    def wait(_module: Any, _inputs: Any) -> None:
        open("waiting", "w").close()
        time.sleep(1000)

    model.model.layers[0].register_forward_pre_hook(wait)


def raises(model: Any) -> None:
    raise ValueError("this patch is broken")


def stale_layer_on_rank_1(model: Any) -> None:
    """Layer 2 as it was before an update, on the last rank only."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            for parameter in model.model.layers[2].parameters():
                parameter.mul_(0.9)


def _shift_positions(model: Any, change: Any) -> None:
    """The rotary embedding sees other position ids than it is given."""
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, change(position_ids))


def positions_off_by_one(model: Any) -> None:
    """The trainer counts from 1."""
    _shift_positions(model, lambda ids: ids + 1)


def positions_count_padding(model: Any) -> None:
    """Positions are columns, padding included."""
    _shift_positions(model, lambda ids: torch.arange(ids.shape[1]).expand_as(ids))


def _scale_output(module: Any, factor: float) -> None:
    def scale(_module: Any, _inputs: Any, output: Any) -> Any:
        value, *rest = output if isinstance(output, tuple) else (output,)
        return (value * factor, *rest) if rest else value * factor

    module.register_forward_hook(scale)


def scale_key_norm(model: Any) -> None:
    """Layer 1's k_norm is 1 % too large."""
    _scale_output(model.model.layers[1].self_attn.k_norm, 1.01)


def scale_fused_norm(model: Any) -> None:
    """In vLLM: what its add and norm in layer 2 gives as normed is 2 % too large."""
    _scale_output(model.model.layers[2].post_attention_layernorm, 1.02)


def scale_up_projection_in_megatron(model: Any) -> None:
    """What the MLP of layer 1 multiplies is 2 % too large."""
    _scale_output(model.decoder.layers[1].mlp.linear_fc1, 1.02)


def ulp_in_the_first_norm(model: Any) -> None:
    """Layer 0's attn_norm is one unit in the last place too large."""

    def up(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(output, torch.full_like(output, torch.inf))

    model.model.layers[0].input_layernorm.register_forward_hook(up)


def compute_down_proj_elsewhere(model) -> None:
    """A kernel of the user's own where ours was put in, which is then never called."""
    linear = model.model.layers[1].mlp.down_proj
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight)


def give_down_proj_back(model) -> None:
    model.model.layers[1].mlp.down_proj.__class__ = torch.nn.Linear


def own_norm_on_rank_1(model: Any) -> None:
    """One rank alone norms by something else than the kernels, which are in place."""
    if torch.distributed.get_rank() != 1:
        return
    of_megatron = hasattr(model, "decoder")
    layer = (model.decoder if of_megatron else model.model).layers[1]
    norm = layer.input_layernorm

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)
        return normed if residual is None else (normed, x)

    norm.forward = forward


def update_weights(model: Any) -> None:
    """As a trainer syncs them to a rollout engine: vLLM's own `load_weights` in the live model, of
    the checkpoint RLK_TEST_NEW, but for the parameters whose names hold RLK_TEST_STALE: on all
    ranks, or, with `rank 1: ` in front, on that one."""
    from safetensors.torch import load_file

    new = load_file(os.path.join(os.environ["RLK_TEST_NEW"], "model.safetensors"))
    stale = os.environ.get("RLK_TEST_STALE") or "nothing"
    if stale.startswith("rank 1: "):
        from vllm.distributed import get_tp_group

        stale = stale.removeprefix("rank 1: ") if get_tp_group().rank_in_group else "nothing"
    with torch.no_grad():
        model.load_weights([(name, value) for name, value in new.items() if stale not in name])
    # What a framework's switch finds, which asks by digests.
    from rlk_kernels.integrations.frameworks import differences, row_digests, to_bytes
    from rlk_kernels.integrations.vllm.weights import held

    sent = to_bytes({name: row_digests(value) for name, value in new.items()})
    found = differences(sent, held(model), model.config.tie_word_embeddings)
    assert all(stale in name for name in found), found
    assert bool(found) == (stale != "nothing")


def _delta(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of an adapter of rank 4."""
    random = torch.Generator().manual_seed(0)
    down = 0.05 * torch.randn(4, weight.shape[1], generator=random)
    up = 0.05 * torch.randn(weight.shape[0], 4, generator=random)
    return down.to(weight.dtype), up.to(weight.dtype)


def adapter_added(model):
    """LoRA as training has it: beside the weight."""
    for layer in model.model.layers:
        projection = layer.self_attn.q_proj
        down, up = _delta(projection.weight)
        projection.register_forward_hook(
            lambda _m, args, out, down=down, up=up: out + (args[0] @ down.T) @ up.T
        )


def adapter_merged(model):
    """The same adapter as a rollout engine gets it: in the weight."""
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        down, up = _delta(weight)
        weight.data = (weight.data.float() + up.float() @ down.float()).to(weight.dtype)


def logits_padded_with_zeros(model):
    model.lm_head.register_forward_hook(
        lambda _m, _args, out: torch.nn.functional.pad(out, (0, 64))
    )


def logits_padded_with_infinities(model):
    model.lm_head.register_forward_hook(
        lambda _m, _args, out: torch.nn.functional.pad(out, (0, 64), value=float("-inf"))
    )


def epsilon_outside_of_the_root(model: Any) -> None:
    """RMSNorm as x / (sqrt(mean x²) + eps)."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms
    for norm in norms:
        norm.forward = partial(_rms_norm_with_epsilon_outside, norm)


def _rms_norm_with_epsilon_outside(norm: Any, x: torch.Tensor) -> torch.Tensor:
    root = x.float().square().mean(-1, keepdim=True).sqrt()
    return norm.weight * (x.float() / (root + norm.variance_epsilon)).to(x.dtype)


def head_of_an_earlier_step(model: Any) -> None:
    """Logits by a copy of the head, from before the last update; the live parameter is today's."""
    head = model.lm_head
    drawn = torch.Generator().manual_seed(0)
    noise = torch.randn(head.weight.shape, generator=drawn).to(head.weight.device)
    earlier = (head.weight.detach().float() * (1 + 0.01 * noise)).to(head.weight.dtype)
    head.forward = lambda x: torch.nn.functional.linear(x, earlier)


def drops_a_row(_model: Any) -> None:
    """Taps that lose the row of one operator at one token, behind every cached prefix."""
    from rlk_align.trace.writer import PassWriter

    write = PassWriter.__call__

    def lossy(self: PassWriter, site: str, rows: torch.Tensor, sample: Any, position: Any) -> None:
        keep = (sample != 2) | (position != 70) | (site != "layers.1.up_proj")
        write(self, site, rows[torch.from_numpy(keep)], sample[keep], position[keep])

    PassWriter.__call__ = lossy  # type: ignore[method-assign]


def vocabulary_shard_off_by_one(model: Any) -> None:
    """The second half of the vocabulary begins with the logit of the last token of the first."""
    half = model.config.vocab_size // 2

    def repeat(_module: Any, _inputs: Any, logits: Any) -> Any:
        logits = logits.clone()
        logits[..., half] = logits[..., half - 1]
        return logits

    model.lm_head.register_forward_hook(repeat)
