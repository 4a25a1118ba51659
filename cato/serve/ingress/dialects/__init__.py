"""The APIs of IDEs and agents. To add one: a file here, its routes in `ingress.app.DIALECTS`."""
