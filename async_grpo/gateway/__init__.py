"""A model behind OpenAI's HTTP protocol, with the token ids of every turn.

    a request ─▶ app ─▶ wire (what is asked) ─▶ answer_plan: messages to ids by chat/
              ─▶ session ─▶ Sampler.sample, in pieces ─▶ wire (JSON, or events) ─▶ client

`run_gateway.py` serves the policy of a run, `serving.py` a model of its own, by Ray and vLLM. No
Ray, torch or vLLM in the others: a sampler is an episode's policy, or an engine.
"""
