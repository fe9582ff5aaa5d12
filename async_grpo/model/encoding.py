"""What a tokenizer makes of text, as one hash: the same however it was saved, and by whom."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Shows what is done around the model: cases, accents, digits, spaces, scripts, code.
PROBE = (
    "Use 2 9 8 to make 15:\n  8-2+9 = 15.\n\nThe   THE the\tcafé cafe\u0301 naïve ﬁ 12345 3.14 "
    "你好，世界 Привет こんにちは مرحبا 한국어 🙂👩\u200d🚀 \\boxed{x^2} <b>def f(x): return 1"
)


def encoding_hash(tokenizer: Any) -> str:
    """Sha256 over the vocabulary, the model (merges, scores), and the ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none of one written in Python
    model = json.loads(backend.to_str())["model"] if backend else None
    parts = [tokenizer.get_vocab(), model, list(tokenizer(PROBE)["input_ids"])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
