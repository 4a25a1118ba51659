"""What operators read: metrics, traces and decision logs."""
