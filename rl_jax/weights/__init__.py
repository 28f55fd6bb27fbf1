"""Weights from the train mesh to every server: plan, transport, commit; owns which version is published.

plan.py checks names, shapes, dtypes and shardings of both sides once, before step 0, and cuts the parameters into
buckets. layout.py finds, by geometry, a layout on the train mesh from which every server's shards are whole per-device
copies. transport.py moves one bucket. lanes.py gives every wait a deadline. sync.py runs the protocol.
"""
