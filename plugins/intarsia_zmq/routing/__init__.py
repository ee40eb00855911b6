"""A router over replicas: one address for clients, and any number of servers behind it.

To its clients it is a server: the same sockets, sessions and messages. To its replicas it is a client. It loads no
model and knows no tokens but those that it passes on.

**Where a request goes.** With the policy `prefix`, to the replica r of the smallest

    cost(r) = prompt - cached(r) + queued(r) + request_tokens * (choices(r) + foreign(r))

where all is about tokens: `prompt` is the request's own; `cached(r)` the part of it that r has been sent before, under
an equal salt, as long as that is remembered (see `prefixes`); `queued(r)` the prompts that r was sent and has not
begun, as far as is known, less what was cached of them; `choices(r)` how many answers r is at for this router; and
`foreign(r)` how many requests r says that it has in flight beyond those, for other routers and clients. So a cached
prefix is worth as many tokens as need not be computed again, and a busy replica loses a request to an idle one as
soon as its own work outweighs that. `least_loaded` is the same without `cached`. `round_robin` takes the replica whose
turn was the longest ago, which also decides between equal costs.

**What outlives a replica.** See `attempts`: a request that has said nothing is simply asked for again elsewhere, and
one that has is repeated and compared, so that no token comes twice and none comes from another answer.
"""
