"""The status page: one page without a build step, and the JSON that it shows."""
