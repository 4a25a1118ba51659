"""The APIs of IDEs and agents. A new dialect: a file here, its routes in `ingress.app.DIALECTS`."""
