"""The drafter in PyTorch: its layers, the injection, the transition cache, and its checkpoint.

Shapes: b sequences, n blocks each, t rows a block (row 0 is the anchor), c context positions.
A *feature* is a readout scaled to length sqrt(R); a *code* is a token's fixed row of length one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

DROPOUT = 0.1  # of the context rows, while training


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter; the defaults fit SmolLM2-135M."""

    hidden: int = 576
    layers: int = 3
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 49152
    target_layers: int = 30
    target_layer_ids: tuple[int, ...] = (2, 9, 16, 23, 28)
    block: int = 16
    top_k: int = 16
    rank: int = 128
    message: int = 96
    mask_token_id: int = 16  # <empty_output>, which the chat format never uses
    rope_theta: float = 100000.0
    eps: float = 1e-5


class ScaledByRms(torch.autograd.Function):
    """RMS norm over the last axis in float32, rounded to `dtype`.

    Torch's own takes its gradient operation by operation, about twice the passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.float()
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (size.square() / x.shape[-1] + eps).rsqrt()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, None, None]:
        normed, scale, weight = ctx.saved_tensors
        given = given.float()
        both = given * normed
        # d/dx of x / rms: what is left of the gradient across the row's own direction.
        along = (both @ weight)[..., None] / normed.shape[-1]
        inner = torch.addcmul(given * weight, normed, along, value=-1).mul_(scale)
        return inner, both.flatten(0, -2).sum(dim=0), None, None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Under autocast the result has the type of the products that follow."""
        auto = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if auto else x.dtype
        out: Tensor = ScaledByRms.apply(x, self.weight, self.eps, dtype)
        return out


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., head_dim] for the half-split (neox) pairing."""
    steps = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[..., None] * theta**-steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., heads, head_dim], tables [..., head_dim]."""
    cos, sin = (table[..., None, :].to(x.dtype) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., hidden] to keys and values [..., kv_heads, head_dim]."""
        split = (*x.shape[:-1], self.shape.kv_heads, self.shape.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(split)), tables)
        return keys, self.v_proj(x).view(split)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """x [b, n, t, hidden]; context keys and values [b, c, kv, d]; mask [b, n, c] additive."""
        s = self.shape
        b, n, t, _ = x.shape
        group = s.heads // s.kv_heads
        q = self.q_proj(x).view(b, n, t, s.heads, s.head_dim)
        q = rotate(self.q_norm(q), tables) * s.head_dim**-0.5
        # [b, kv, n, group, t, d]: rows of one key head side by side make large products.
        q = q.view(b, n, t, s.kv_heads, group, s.head_dim).permute(0, 3, 1, 4, 2, 5)
        own_k, own_v = (y.permute(0, 3, 1, 2, 4) for y in self.keys_values(x, tables))
        far_k, far_v = (y.permute(0, 2, 1, 3) for y in context)
        far = q.reshape(b, s.kv_heads, n * group * t, s.head_dim) @ far_k.transpose(-1, -2)
        far = far.view(b, s.kv_heads, n, group * t, -1) + mask[:, None, :, None, :].to(far.dtype)
        near = q.reshape(b, s.kv_heads, n, group * t, s.head_dim) @ own_k.transpose(-1, -2)
        causal = torch.full((t, t), -torch.inf).triu(1).repeat(group, 1).to(near.dtype)
        weights = torch.cat([far, near + causal], dim=-1).softmax(dim=-1)
        wide = weights[..., : far.shape[-1]].reshape(b, s.kv_heads, n * group * t, -1) @ far_v
        out = wide.view(b, s.kv_heads, n, group * t, s.head_dim)
        out = out + weights[..., far.shape[-1] :] @ own_v
        out = out.view(b, s.kv_heads, n, group, t, s.head_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(b, n, t, s.heads * s.head_dim))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Injection(nn.Module):
    """Adjacent injection; `write` is also what the transition cache applies."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        rank, size = shape.rank, shape.message

        def per_layer(i: int, o: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(i, o, bias=False) for _ in range(shape.layers))

        self.readouts = per_layer(shape.hidden, rank)
        self.writes = per_layer(size, shape.hidden)
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))
        self.rank = rank

    def feature(self, layer: int, h: Tensor) -> Tensor:
        return self.rank**0.5 * F.normalize(self.readouts[layer](h).float(), dim=-1, eps=1e-12)

    def write(self, layer: int, h: Tensor, receiver: Tensor, predecessor: Tensor) -> Tensor:
        gate = self.receiver_gate(receiver) + self.predecessor_gate(predecessor) + self.bias
        update = self.writes[layer](torch.sigmoid(gate) * self.message(predecessor))
        size = h.float().norm(dim=-1, keepdim=True) * h.shape[-1] ** -0.5
        return h + (size * update.float()).to(h.dtype)


@dataclass
class Block:
    """What one pass over blocks leaves: rows [b, n, t, hidden], features a layer [.., R]."""

    last: Tensor  # pre-injection rows of the last layer
    out: Tensor  # post-injection rows of the last layer, before the final norm
    features: list[Tensor]  # post-injection, for the alignment loss


class Drafter(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.injection = Injection(shape)
        self.transfer_codes: Tensor
        self.register_buffer("transfer_codes", torch.zeros(shape.vocabulary, shape.rank))

    def context(self, taps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values a layer of the committed positions 0.. of taps [b, c, taps * hidden]."""
        c = F.dropout(self.hidden_norm(self.fc(taps)), DROPOUT, self.training)
        tables = self.tables(torch.arange(taps.shape[1])[None])
        return [layer.self_attn.keys_values(c, tables) for layer in self.layers]

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    def code(self, tokens: Tensor) -> Tensor:
        return self.shape.rank**0.5 * self.transfer_codes[tokens]

    def forward(
        self,
        rows: Tensor,
        anchors: Tensor,
        anchor_tokens: Tensor,
        context: list[tuple[Tensor, Tensor]],
        teach: tuple[Tensor, Tensor] | None = None,
        inject: bool = True,
    ) -> Block:
        """rows [b, n, t, hidden]: embeddings of anchor and masks; anchors [b, n]: positions.

        `teach` = (tokens, where) replaces a row's predecessor feature by the code of its true
        predecessor where `where` [b, n, t] holds.
        """
        t = rows.shape[2]
        tables = self.tables(anchors[..., None] + torch.arange(t))
        length = context[0][0].shape[1]
        visible = torch.arange(length) < anchors[..., None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        block = Block(rows, rows, [])
        for i, layer in enumerate(self.layers):
            block.last = layer(block.out, tables, context[i], mask)
            block.out = block.last
            if inject:
                block.out = self.inject(i, block.last, anchor_tokens, teach)
            block.features.append(self.injection.feature(i, block.out))
        return block

    def inject(
        self, i: int, h: Tensor, anchor_tokens: Tensor, teach: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        feature = self.injection.feature(i, h)
        first = self.code(anchor_tokens)[..., None, :]
        predecessor = torch.cat([first, feature[..., 1:-1, :]], dim=-2)
        if teach is not None:
            tokens, where = teach
            true = self.code(tokens[..., :-1])
            predecessor = torch.where(where[..., 1:, None], true, predecessor)
        written = self.injection.write(i, h[..., 1:, :], feature[..., 1:, :], predecessor)
        return torch.cat([h[..., :1, :], written], dim=-2)

    def refine(self, last: Tensor, predecessors: Tensor) -> Tensor:
        """The transition cache's normed rows: last [.., hidden], predecessors [..] token ids."""
        i = self.shape.layers - 1
        receiver = self.injection.feature(i, last)
        return self.norm(self.injection.write(i, last, receiver, self.code(predecessors)))


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of layout A."""
    return {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": shape.block,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
        "dspine_config": {
            "message_size": shape.message,
            "top_k": shape.top_k,
            "transfer_rank": shape.rank,
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": 8192,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": shape.target_layers,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def shape_of(config: dict[str, Any]) -> Shape:
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        target_layers=config["num_target_layers"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        block=config["block_size"],
        top_k=config["dspine_config"]["top_k"],
        rank=config["dspine_config"]["transfer_rank"],
        message=config["dspine_config"]["message_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        rope_theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )


def save_checkpoint(folder: Path, shape: Shape, state: dict[str, Tensor]) -> None:
    """Layout A in BF16; `state` is a drafter's state_dict."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    tensors["transfer_ready"] = torch.tensor(True)
    temporary = folder / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")
    text = json.dumps(config_of(shape), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def load_checkpoint(folder: Path) -> Drafter:
    """A drafter from layout A, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    drafter = Drafter(shape_of(config))
    tensors = load_file(folder / "model.safetensors")
    if not tensors.pop("transfer_ready").item():
        raise ValueError(f"{folder}: transfer_ready is false, the codes are not trained")
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    return drafter
