# Runs Python in a container: enter.sh PYTHON ARGUMENT... What the node agent itself needs is installed where it is
# missing; what the ranks need is the agent's affair.
python=$1
shift
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || {
    echo "accelmark: error: the image has no Python 3.9 or newer as $python (container.python names another)" >&2
    exit 91
}
if ! "$python" -c 'import sys, psutil, pydantic, yaml; sys.version_info >= (3, 10) or __import__("eval_type_backport")' 2>/dev/null; then
    "$python" -m pip install --disable-pip-version-check --root-user-action ignore psutil 'pydantic>=2.9' PyYAML \
        'eval_type_backport; python_version < "3.10"' || {
        echo "accelmark: error: the image has no psutil, pydantic and PyYAML for the node agent, and pip installs none" >&2
        exit 93
    }
fi
exec "$python" "$@"
