"""The trainer on one NVIDIA device: speed, memory, and whether its numbers are right.

    python -m benchmarks.gpu                    about nine minutes on one H100 or H200
    python -m benchmarks.gpu --parts trainer    one part of it
    python -m benchmarks.gpu --quick            toy sizes; so it is without a device, too
    python -m pytest -m gpu tests/gpu           the numbers against float64, in a second call

Needs torch 2.11 or later, transformers, numpy, click; no Ray, no vLLM, no network. Models are made
of a configuration and random numbers. Liger and flash-attn are compared where they are installed.
Figures are written as they come, so that a call which is cut short leaves what it had;
docs/performance.md says what each of them means.

    shapes.py     models and how much arithmetic a row costs    trainer.py    whole gradient steps
    rows.py       packed rows of given lengths                  heads.py      log-probabilities
    clock.py      time, memory and the device's peak            attention.py  attention back ends
    isolation.py  one process a variant, with a deadline        numerics.py   against float64
    plan.py       what runs, in which order                     summary.py    shares and ratios
    sheet.py      the screen and the file                       __main__.py   the command
"""
