#!/bin/bash
# The vendor's Python with vllm-ascend and CANN's environment, which in the vendor's image only login
# shells of root have.
for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -r "$script" ]; then
        # shellcheck disable=SC1090
        source "$script"
    fi
done
exec /opt/engine/vendor-python3 "$@"
