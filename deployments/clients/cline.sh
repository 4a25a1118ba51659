#!/bin/sh
# Cline's command line; then `cline "Add a test."`. In VS Code: Cline's settings, API Provider "OpenAI Compatible", with the
# same base URL, key and model.
exec cline auth openai --baseurl http://127.0.0.1:8000/v1 --apikey none --modelid cato-auto
