"""Python runs this as it starts, in processes that `imports.hide_misfits` has given this folder.

vLLM's engine core is such a process: none of our code runs there before transformers is imported.
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
