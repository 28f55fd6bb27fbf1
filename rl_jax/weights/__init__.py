"""Weights from the train mesh to every server: plan, transport, commit; owns which version is published.

plan.py checks names, shapes, dtypes and shardings of both sides once, before step 0, and cuts the parameters into
buckets. Two transports move a bucket between meshes, under one conformance suite: packed_copy.py (each source device
packs what each target device needs; no collective; the default) and reshard_copy.py (a collective into the target's
layout on the train mesh, then shard to shard); `weights.transport` says which. host_copy.py takes a bucket to the host
for servers of other processes. layout.py is the arithmetic on shardings they share. lanes.py gives every wait a
deadline.
sync.py runs the protocol.
"""
