"""Allocator settings: reading the user's own, merging ours in, and saying why that is refused.

Two names exist. `PYTORCH_CUDA_ALLOC_CONF` is always set: it wins when both are there, and torch 2.9 ignored
the new name `PYTORCH_ALLOC_CONF` for expandable segments. The new name gets the same text from torch 2.9 on,
so that neither the reader nor a later release sees two truths.
"""

from __future__ import annotations

from collections.abc import Mapping

from oomscope.errors import FixError

OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
NEW_NAME = "PYTORCH_ALLOC_CONF"
_NEW_NAME_SINCE = (2, 9)


def split_settings(text: str) -> dict[str, str]:
    """`"a:1,b:[2:3,4:5]"` as `{"a": "1", "b": "[2:3,4:5]"}`, in order; commas in brackets do not split."""
    found: dict[str, str] = {}
    depth, start = 0, 0
    for index, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            key, _, value = text[start:index].partition(":")
            start = index + 1
            if key.strip():
                found[key.strip()] = value.strip()
    return found


def join_settings(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}:{value}" if value else key for key, value in settings.items())


def current_settings(env: Mapping[str, str], used: str | None = None) -> dict[str, str]:
    """The settings the job runs with: what the process reported, else the variable that wins."""
    if used:
        return split_settings(used)
    return split_settings(env.get(OLD_NAME) or env.get(NEW_NAME) or "")


def is_on(value: str | None) -> bool:
    return (value or "").strip().lower() in ("true", "1")


def why_not_expandable(
    env: Mapping[str, str], used: str | None = None, platform: str = "linux"
) -> str | None:
    """The reason why `expandable_segments:True` cannot be added, or None."""
    settings = current_settings(env, used)
    value = settings.get("expandable_segments")
    if is_on(value):
        return f"already active: the allocator runs with expandable_segments:{value}"
    if value is not None:
        return f"the job sets expandable_segments:{value} itself; remove that setting first"
    if settings.get("backend", "native").lower() == "cudamallocasync":
        return "the job uses backend:cudaMallocAsync, which ignores expandable_segments"
    if "max_split_size_mb" in settings:
        return (
            "the job sets max_split_size_mb, which has no meaning with expandable segments; remove it first"
        )
    if platform != "linux":
        return f"expandable segments are not supported on {platform}"
    return None


def merge_allocator_settings(
    env: Mapping[str, str], added: Mapping[str, str], torch_version: tuple[int, int]
) -> dict[str, str]:
    """The variables to set so that `added` holds beside everything the user had set.

    Raises:
        FixError: a setting of `added` is there already, with the same or with another value.
    """
    settings = current_settings(env)
    for key, value in added.items():
        if key in settings:
            state = "already active" if settings[key].lower() == value.lower() else "set by the job itself"
            raise FixError(
                f"{key}:{settings[key]} is {state} in {OLD_NAME if env.get(OLD_NAME) else NEW_NAME}",
                hint="remove it from the environment to let oomscope choose it",
            )
        settings[key] = value
    text = join_settings(settings)
    merged = {OLD_NAME: text}
    if torch_version >= _NEW_NAME_SINCE or torch_version == (0, 0) or env.get(NEW_NAME):
        merged[NEW_NAME] = text
    return merged
