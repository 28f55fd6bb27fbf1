"""The decode server as a product: OpenAI's HTTP interface, and others', over a Sampler that streams (serve.Router).

Life of a request: 1 gate.py bounds what arrives (body, time, token) and says no when too much is here already.
2 schemas.py checks its fields; asks.py makes of it prompts of tokens and one way of sampling. 3 completion.py samples
its choices through the router and gives pieces of text with their tokens, log-probs and versions; text.py makes text of
tokens and finds stop strings. 4 said.py tells content from tool calls; replies.py and other_apis.py put all that into
the bodies of each interface. 5 sse.py sends a stream, or api.py one body; whoever goes away meanwhile ends the work.
Imports neither jax nor an engine, so that all of it runs on a FakeSampler.
"""
