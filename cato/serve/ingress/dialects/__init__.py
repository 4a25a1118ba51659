"""The APIs of IDEs and agents. To add one: a file here, and its routes in `ingress.app.DIALECTS`."""
