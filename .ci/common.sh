# What .ci/run and .ci/nightly share: the environments that they test in, and parts with their seconds. To be sourced.
# shellcheck shell=bash

venv=${MESHMEND_CI_VENV:-.venv-ci}
torch="$venv-torch/bin/python"
times="$venv-times"
rm -rf "$times" && mkdir -p "$times"
# Most of an installation would be the compiling of modules that no test imports: Python does that for those it imports.
# pip reads a falsy value of this one as "do not".
export PIP_NO_COMPILE=0 PYTHONDONTWRITEBYTECODE="" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$PWD/constraints.txt

# Programs that XLA has compiled for tests are kept with the environment, and removed with it or after a month.
MESHMEND_TESTS_COMPILED=$(realpath -m "$venv")/compiled
export MESHMEND_TESTS_COMPILED
if [ -d "$MESHMEND_TESTS_COMPILED" ]; then find "$MESHMEND_TESTS_COMPILED" -type f -mtime +30 -delete; fi

# The judge of our predictions, the browser that our pages are tried in, what makes the lab's network namespaces, what
# tells hosts how they are wired, and the server that scrapes a job's metrics. Without them, and without the right to
# install them, their tests are skipped and say so.
install_tools() {
  local missing=()
  /usr/bin/python3 -c 'import simgrid' > /dev/null 2>&1 || missing+=(python3-simgrid)
  command -v chromedriver > /dev/null || missing+=(chromium chromium-driver)
  command -v ip > /dev/null || missing+=(iproute2)
  command -v lldpd > /dev/null || missing+=(lldpd)
  command -v promtool > /dev/null || missing+=(prometheus prometheus-node-exporter-)  # the server alone
  if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "${missing[@]}" > /dev/null
  fi
}

# Runs a part, and notes its seconds, its budget, its exit status and its CPU seconds: `part NAME BUDGET command…`. CPU
# seconds hardly depend on what runs beside it.
part() {
  local name=$1 budget=$2 status=0 began=$SECONDS shell=$BASHPID used
  shift 2
  used=$(cpu_seconds "$shell")
  "$@" || status=$?
  used=$(($(cpu_seconds "$shell") - used))
  printf '%s\t%s\t%s\t%s\t%s\n' "$name" $((SECONDS - began)) "$budget" "$status" "$used" >> "$times/parts.tsv"
  return "$status"
}

# CPU seconds of a process's children that have ended.
cpu_seconds() {
  awk -v hertz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); print int(($14 + $15) / hertz) }' "/proc/$1/stat"
}

# Runs pytest with a report of its tests, and with a copy of what it prints: `tests NAME PYTHON -m pytest arguments…`.
tests() {
  local name=$1
  shift
  "$@" --junitxml "$times/$name.xml" -o junit_family=xunit1 2>&1 | tee "$times/$name.log"
}

# Runs functions at once, for parts that leave a core idle. What all but the first print waits for the end of the first;
# all are run to their end, and the check ends here if one of them has failed. Commands in them are joined by &&.
at_once() {
  local status=0 first=$1 one other=() log=()
  shift
  for one in "$@"; do
    log+=("$(mktemp)")
    "$one" > "${log[-1]}" 2>&1 &
    other+=($!)
  done
  ("$first") || status=$?  # in a subshell, or its CPU seconds would include those of the others
  for one in "${!other[@]}"; do
    wait "${other[$one]}" || status=$?
    cat "${log[$one]}"
    rm -f "${log[$one]}"
  done
  return "$status"
}

# Both environments are kept for the next run as long as nothing changes that says what is in them.
key() {
  { cat constraints.txt pyproject.toml lab/pyproject.toml .ci/common.sh && python3 -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum
}

# An environment that was made by the same files has all that would be installed, except for what is under test.
kept() {
  [ -f "$1/key" ] && [ "$(cat "$1/key")" = "$(key)" ]
}

# An empty environment, unless the folder has one to keep: `environment FOLDER`. The pip that Python 3.11 brings takes
# four times the processor time of a newer one to resolve the same.
environment() {
  kept "$1" || { python3 -m venv --clear "$1" && "$1/bin/python" -m pip install --quiet --upgrade pip; }
}

# What would be published is what gets tested: the wheels of both distributions, made from their source distributions.
build_wheels() {
  local build=("$venv/bin/python" -m build --no-isolation --outdir "$venv/dist")
  environment "$venv" && rm -rf "$venv/dist" && "$venv/bin/python" -m pip install --quiet build hatchling hatch-vcs &&
    { { "${build[@]}" . && "${build[@]}" lab; } > "$times/build.log" 2>&1 || { cat "$times/build.log" && false; }; }
}

# torch comes first and alone: what depends on it would bring a build with CUDA, gigabytes of it.
install_torch() {
  environment "$venv-torch" && env -u PIP_CONSTRAINT "$torch" -m pip install --quiet 'torch==2.13.0'
}

# A wheel in place of an older one of the same version, and what it needs: `install ENVIRONMENT WHEEL EXTRAS`.
install() {
  "$1/bin/python" -m pip install --quiet --no-deps --force-reinstall "$2" && needed "$@"
}

needed() {
  kept "$1" || "$1/bin/python" -m pip install --quiet "$2[$3]"
}

with_jax() {
  "$venv/bin/python" -m pip uninstall --quiet --yes meshmend-lab 2> /dev/null
  install "$venv" "$wheel" dev,restart && product_alone && needed "$venv" "$wheel" tpu &&
    install "$venv" "$lab" dev,workloads && key > "$venv/key"
}

# Without the laboratory, the product has all of its own commands and none of the others.
product_alone() {
  "$venv/bin/python" -m pytest -q tests/cli/test_added.py tests/test_architecture.py -k 'added or laboratory or extra' &&
    ! "$venv/bin/meshmend" lab > /dev/null 2>&1
}

with_torch() {
  install "$venv-torch" "$wheel" dev,torch,restart && install "$venv-torch" "$lab" dev && key > "$venv-torch/key"
}

environments() {
  at_once build_wheels install_torch || return
  wheel=$(cd "$venv" && echo "$PWD"/dist/meshmend-*.whl) && lab=$(cd "$venv" && echo "$PWD"/dist/meshmend_lab-*.whl)
  at_once with_jax with_torch && unset PIP_CONSTRAINT
}
