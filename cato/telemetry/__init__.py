"""What operators read: metrics in Prometheus form."""
