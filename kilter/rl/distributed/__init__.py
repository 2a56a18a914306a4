"""A job's ranks as actors of a Ray cluster, and rollouts that go on while the trainer learns (see
docs/async-rl.md).

    launch     `kilter rl` with placement.ray: reserves, starts, watches, starts again
    cluster    Ray itself: the connection, what it has, what is reserved of it
    worker     what an actor does: a rank of the trainer's world, or of a rollout replica's
    roles      `Roles` of a trainer whose rollouts are elsewhere
    rollouts   the replicas and their work: a thread of the trainer's first rank
    book       which prompts are begun, where, and how far: pure bookkeeping
    weights    the trainer's weights as parcels for the object store
"""
