from typing import Any
def prove(a: Any, b: Any) -> dict[str, Any]:
    return {}
