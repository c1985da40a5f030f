"""The graphics cards that can be simulated: usable bytes, capability, constants, and their sources.

The command line lists and resolves cards without torch, so this module needs the standard library only.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from ..units import MIB, parse_size


@dataclass(frozen=True)
class Card:
    """One kind of card, as the CUDA driver shows it to a process."""

    name: str
    """Key on the command line: "a100-40g"."""
    product: str
    """What `torch.cuda.get_device_name()` returns."""
    usable_bytes: int
    """`total_memory` of the device properties: what out-of-memory messages call total capacity."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    context_bytes: int
    """Device memory of the CUDA context with torch's kernels loaded; never handed out by cudaMalloc."""
    nccl_bytes: int
    """Device memory of NCCL's buffers of a process group, only when world size > 1."""
    source: str
    """Where `usable_bytes` was seen, or "assumed". Context and NCCL are always assumed, unless overridden."""
    count: int = 1
    """Cards of this kind in the machine, for scripts that start one process for each; torchrun's own count wins."""
    spec: str = ""
    """What `resolve` made the card of, so that another process can make the same one."""

    def capacity_bytes(self, world_size: int = 1) -> int:
        """Bytes that cudaMalloc can hand out in all to one process that has the card for itself."""
        return max(0, self.usable_bytes - self.context_bytes - (self.nccl_bytes if world_size > 1 else 0))


_CONTEXT = 500 * MIB  # assumed: 300 to 700 MiB are seen, depending on driver, card and kernels loaded
_GIB = 1 << 30


def _card(
    name: str, product: str, gib: float, cc: tuple[int, int], sms: int, nccl_mib: int, source: str
) -> Card:
    return Card(name, product, round(gib * _GIB), cc, sms, _CONTEXT, nccl_mib * MIB, source)


def _message(where: str) -> str:
    return f"out-of-memory message in {where}"


# Multiprocessor counts and compute capabilities: NVIDIA's data sheets and CUDA programming guide.
_TABLE = (
    _card("t4-16g", "Tesla T4", 14.57, (7, 5), 40, 200, _message("QwenLM/Qwen3-VL#1046")),
    _card("p100-16g", "Tesla P100-PCIE-16GB", 15.89, (6, 0), 56, 200, "assumed"),
    _card("v100-16g", "Tesla V100-SXM2-16GB", 15.77, (7, 0), 80, 300, "assumed"),
    _card("v100-32g", "Tesla V100-SXM2-32GB", 31.74, (7, 0), 80, 300,
          _message("liucongg/ChatGLM-Finetuning#73")),
    _card("a10g-24g", "NVIDIA A10G", 22.18, (8, 6), 80, 200, "assumed"),
    _card("a30-24g", "NVIDIA A30", 23.53, (8, 0), 56, 300, _message("google/RB-Modulation#5")),
    _card("a40-48g", "NVIDIA A40", 44.34, (8, 6), 84, 300, "assumed"),
    _card("a100-40g", "NVIDIA A100-SXM4-40GB", 39.50, (8, 0), 108, 600, _message("TianheWu/CoSeR#10")),
    _card("a100-80g", "NVIDIA A100-SXM4-80GB", 79.25, (8, 0), 108, 600, _message("levihsu/OOTDiffusion#235")),
    _card("l4-24g", "NVIDIA L4", 22.03, (8, 9), 58, 200, "assumed"),
    _card("l40s-48g", "NVIDIA L40S", 44.40, (8, 9), 142, 300, "assumed"),
    _card("h100-80g", "NVIDIA H100 80GB HBM3", 79.10, (9, 0), 132, 900, "assumed"),
    _card("h100-94g", "NVIDIA H100 NVL", 93.00, (9, 0), 132, 900, _message("ali-vilab/VACE#56")),
    _card("h200-141g", "NVIDIA H200", 139.81, (9, 0), 132, 900, "assumed"),
    _card("b200-180g", "NVIDIA B200", 178.35, (10, 0), 148, 900, "device properties in pytorch/ao#4002"),
    _card("gh200-96g", "NVIDIA GH200 480GB", 94.50, (9, 0), 132, 900, "assumed"),
    _card("rtx2080ti-11g", "NVIDIA GeForce RTX 2080 Ti", 10.73, (7, 5), 68, 200,
          _message("Morizeyao/GPT2-Chinese#104, card not named")),
    _card("rtx3060-12g", "NVIDIA GeForce RTX 3060", 11.76, (8, 6), 28, 200, "assumed"),
    _card("rtx3080-10g", "NVIDIA GeForce RTX 3080", 9.78, (8, 6), 68, 200, _message("zai-org/CogVideo#34")),
    _card("rtx3090-24g", "NVIDIA GeForce RTX 3090", 23.69, (8, 6), 82, 200, "assumed"),
    _card("rtx4060-8g", "NVIDIA GeForce RTX 4060", 7.63, (8, 9), 24, 200, "assumed"),
    _card("rtx4070-12g", "NVIDIA GeForce RTX 4070", 11.60, (8, 9), 46, 200, "assumed"),
    _card("rtx4080-16g", "NVIDIA GeForce RTX 4080", 15.70, (8, 9), 76, 200, "assumed"),
    _card("rtx4090-24g", "NVIDIA GeForce RTX 4090", 23.64, (8, 9), 128, 200, _message("ali-vilab/VGen#104")),
    _card("rtx5090-32g", "NVIDIA GeForce RTX 5090", 31.37, (12, 0), 170, 200,
          _message("Wan-Video/Wan2.1#465")),
    _card("rtxa6000-48g", "NVIDIA RTX A6000", 47.53, (8, 6), 84, 200, "assumed"),
    _card("rtx6000ada-48g", "NVIDIA RTX 6000 Ada Generation", 47.50, (8, 9), 142, 200, "assumed"),
)  # fmt: skip

#: Every card by name.
CARDS: dict[str, Card] = {card.name: card for card in _TABLE}

_OVERRIDES = ("usable", "context", "nccl", "cc", "sms", "name", "count")
_MOST_CARDS = 64


def resolve(spec: str) -> Card:
    """The card that `spec` names.

    `spec` is a name of the table ("a100-40g"; "a100" takes the first of that family), or a size ("24GiB": a
    card of compute capability 8.0 whose total is that size). Constants can be overridden after commas:
    "h100-80g,context=600MiB,nccl=0,cc=9.0,count=8". A leading "sim:" is ignored.

    Raises:
        ValueError: no such card, size or override; the text names the nearest and lists all.
    """
    text = spec.strip()
    if text.lower().startswith("sim:"):
        text = text[4:]
    head, *overrides = (part.strip() for part in text.split(","))
    card = _named(head)
    for override in overrides:
        card = _override(card, override)
    return replace(card, spec=",".join((head, *overrides)))


def _named(text: str) -> Card:
    key = text.lower().replace("_", "-").replace(" ", "")
    if key in CARDS:
        return CARDS[key]
    compact = key.replace("-", "")
    for name, card in CARDS.items():
        if compact in (name.replace("-", ""), name.split("-")[0], name.replace("-", "") + "b"):
            return card
    if key[:1].isdigit() or key[:1] == ".":
        bare = next((card for name, card in CARDS.items() if name.startswith("rtx" + compact)), None)
        if bare is not None and len(compact) >= 4 and compact[:4].isdigit():
            return bare
        return _of_size(text)
    near = difflib.get_close_matches(key, CARDS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"no card {text!r}.{hint} Cards: {', '.join(CARDS)}; or a size such as 24GiB")


def _of_size(text: str) -> Card:
    try:
        size = parse_size(text)
    except ValueError as problem:
        raise ValueError(f"no card {text!r}: {problem}. Cards: {', '.join(CARDS)}") from None
    if size < 256 * MIB:
        raise ValueError(
            f"no card {text!r}: below 256 MiB nothing runs (write 24GiB). Cards: {', '.join(CARDS)}"
        )
    context = min(_CONTEXT, size // 4)
    return Card(
        text, f"Simulated GPU {text}", size, (8, 0), 108, context, 200 * MIB, "given on the command line"
    )


def _whole(text: str, most: int) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise ValueError(f"not a number from 1 to {most}")
    return value


def _override(card: Card, text: str) -> Card:
    key, _, value = (part.strip() for part in text.partition("="))
    try:
        if key == "usable":
            return replace(card, usable_bytes=parse_size(value), source="given on the command line")
        if key == "context":
            return replace(card, context_bytes=parse_size(value))
        if key == "nccl":
            return replace(card, nccl_bytes=parse_size(value))
        if key == "sms":
            return replace(card, multiprocessors=_whole(value, 1 << 16))
        if key == "name" and value:
            return replace(card, product=value)
        if key == "count":
            return replace(card, count=_whole(value, _MOST_CARDS))
        if key == "cc":
            major, _, minor = value.partition(".")
            return replace(card, compute_capability=(int(major), int(minor or 0)))
    except ValueError as problem:
        raise ValueError(f"bad value in {text!r}: {problem}") from None
    near = difflib.get_close_matches(key, _OVERRIDES, n=1)
    hint = f" Did you mean {near[0]}=?" if near else ""
    raise ValueError(f"no card setting {key!r}.{hint} Settings: {', '.join(_OVERRIDES)}")
