"""The status page: plain HTML and JavaScript without a build step, and its JSON routes."""
