# Sets a container up and runs Python in it: enter.sh PYTHON [DIRECTORY...] -- ARGUMENT...
# Directories come vendor first: the first requirements.txt counts alone, every environment_variables.sh is read
# (the case's before the vendor's), and every csrc/setup.py is built.
python=$1
shift
requirements=
first=
second=
while [ "$1" != -- ]; do
    if [ -z "$requirements" ] && [ -f "$1/requirements.txt" ]; then requirements=$1/requirements.txt; fi
    if [ -f "$1/environment_variables.sh" ]; then
        second=$first
        first=$1/environment_variables.sh
    fi
    if [ -f "$1/csrc/setup.py" ]; then
        build=$(mktemp -d) && cp -r "$1/csrc/." "$build" && (cd "$build" && "$python" setup.py install) || {
            echo "accelmark: $1/csrc could not be built" >&2
            exit 91
        }
    fi
    shift
done
shift
if [ -n "$requirements" ]; then
    "$python" -m pip install --disable-pip-version-check --root-user-action ignore -r "$requirements" || {
        echo "accelmark: $requirements could not be installed" >&2
        exit 92
    }
fi
"$python" -c 'import psutil, pydantic, yaml' 2>/dev/null ||
    "$python" -m pip install --disable-pip-version-check --root-user-action ignore psutil 'pydantic>=2.9' PyYAML || {
    echo "accelmark: the node agent's own requirements could not be installed" >&2
    exit 93
}
if [ -n "$first" ]; then . "$first"; fi
if [ -n "$second" ]; then . "$second"; fi
exec "$python" "$@"
