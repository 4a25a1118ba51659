"""Links: connections from an ingress to routers and replicas, and from replicas to their router.

`codec` serializes values, `handshake` authenticates peers by the pool's secret, `connection` is
either end of a link, and `endpoints` opens links. Uses neither Ray nor pickle.
"""
