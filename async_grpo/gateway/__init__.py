"""A model behind OpenAI's HTTP protocol, with the token ids of every turn.

    a request ─▶ app ─▶ wire (what is asked) ─▶ session.Session: messages to ids by chat/
              ─▶ base.Sampler.sample, in pieces ─▶ stopping ─▶ replies (JSON, or events) ─▶ client

`server.py` listens; `agent.py` is the environment of an agent that speaks this protocol. No Ray,
torch or vLLM here: a sampler is an episode's policy, or an engine.
"""
