"""Links: the connections of an ingress to routers and replicas, and of replicas to their router.

`codec` turns values into bytes, `handshake` lets in who knows the pool's secret, `connection` is
either end of a link, and `endpoints` opens them. No Ray here, and no pickle.
"""
