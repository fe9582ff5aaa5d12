"""async-grpo: train a language model with GRPO while it generates.

The path of the data; each stage is a room (a folder), and folders follow this order:

    data/          questions, by ordinal  ◀────────────────────────────────────┐
      ▼                                                                        │
    batching/      admission ─▶ (groups) advantages ─▶ packing into rounds     │ batch trained:
      │  ▲             │  ▲                │  ▲             │                  │ the staleness
      ▼  │             ▼  │                ▼  │             ▼                  │ window moves
    rollout/       verification/       scoring/         training/ ─────────────┤
      ▲                                    ▲                                   │
      └────────────────────────────────────┴── weight_sync/ ◀──────────────────┘
                                               new weights, version v+1, in flight

A room is one thin Ray actor and the pure files that decide for it. Rooms exchange the records of
`types` and never import each other; `controller/` hands out leases on workers, `model/` is shared
by scoring and training, `checkpoint/` saves and resumes, `run/` is the main loop and rank 0,
`telemetry/` watches, `cli/` starts things.
"""

__version__ = "0.1.0"
