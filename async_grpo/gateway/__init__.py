"""A model behind OpenAI's HTTP protocol, with the token ids of every turn.

    a request ─▶ app ─▶ wire: the request's options (of /v1/responses: responses)
              ─▶ answer_plan: messages to ids by chat/ ─▶ session ─▶ Sampler.sample, in pieces
              ─▶ answers, responses: OpenAI's models as JSON, or events ─▶ client

`run_gateway.py` serves the policy of a run by Ray, `serving.py` one model by vLLM. The other files
import no Ray, torch or vLLM: a sampler is an episode's policy, or an engine.
"""
