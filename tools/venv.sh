# Read by tools/demo and tools/test: a local virtual environment with this project installed in it.
#
#   enter_venv [EXTRA]   sets $python, the interpreter of that environment, after installing the project with EXTRA
#                        where a stamp inside the environment does not say that this was done.
#
#   PYTHON   the Python that makes a new environment (default: python3)
#   VENV     the environment's folder (default: .venv in the project)

project="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  printf '%s\n' "$@" >&2
  exit 1
}

# Prints the lowest and the highest minor version of Python 3 that setup.cfg allows.
allowed_minors() {
  local bounds
  bounds="$(sed -n 's/^python_requires *= *>=3\.\([0-9]*\),<3\.\([0-9]*\) *$/\1 \2/p' "$project/setup.cfg")"
  [ -n "$bounds" ] || die "setup.cfg: python_requires does not read '>=3.X,<3.Y'"
  echo "${bounds% *} $((${bounds#* } - 1))"
}

# Stops unless $1 runs and is an allowed Python; $2 says what to do about it.
check_python() {
  local bounds low high version
  bounds="$(allowed_minors)" || exit 1
  low="${bounds% *}" high="${bounds#* }"
  version="$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')" ||
    die "maxmoe needs Python 3.$low to 3.$high, and '$1' does not run." "$2"
  case "$version" in
    3.*) version="${version#3.}" ;;
    *) die "maxmoe needs Python 3.$low to 3.$high, and '$1' is Python $version." "$2" ;;
  esac
  if [ "${version%%.*}" -lt "$low" ] || [ "${version%%.*}" -gt "$high" ]; then
    die "maxmoe needs Python 3.$low to 3.$high, and '$1' is Python 3.$version." "$2"
  fi
}

make_venv() {
  local venv="$1" maker="${PYTHON:-python3}"
  if [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    die "'$venv' is not a virtual environment: name another folder with VENV=FOLDER."
  fi
  check_python "$maker" "Name an allowed one: PYTHON=/path/to/python $0"
  "$maker" -c 'import venv, ensurepip' 2>/dev/null ||
    die "'$maker' lacks the venv module, which some systems package apart: install it (on Debian and Ubuntu" \
      "the package python3-venv), or name another Python: PYTHON=/path/to/python $0"
  echo "Making the virtual environment $venv" >&2
  "$maker" -m venv --clear "$venv" || die "Making the virtual environment failed: the reason is above."
}

# Prints what an installation depends on, as one word.
install_key() {
  "$python" -I -c '
import hashlib, sys
from pathlib import Path
parts = [Path(sys.argv[1], name).read_bytes() for name in ("setup.cfg", "pyproject.toml")]
print(hashlib.sha256(repr((parts, sys.version, sys.argv[1])).encode()).hexdigest())' "$project"
}

install_project() {
  local extras="$1" quiet="--quiet"
  [ ! -t 2 ] || quiet="--progress-bar=on"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2 ||
    die "'$python' has no pip: remove its environment and run $0 again."
  echo "Installing maxmoe and what it needs, once (some hundred MB): pip install -e '.${extras:+[$extras]}'" >&2
  (cd "$project" && "$python" -m pip install --disable-pip-version-check "$quiet" -e ".${extras:+[$extras]}") >&2 ||
    die "Installing maxmoe failed: pip's reason is above. Run $0 again once it is solved."
}

enter_venv() {
  local extra="${1:-}" venv="${VENV:-$project/.venv}" key stamp old_key="" extras=""
  case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
  python="$venv/bin/python"
  if [ ! -x "$python" ]; then
    make_venv "$venv"
  elif [ -n "${PYTHON:-}" ]; then
    same_python "$venv"
  fi
  stamp="$venv/maxmoe_installed"
  key="$(install_key)" || die "'$python' does not run: remove '$venv' and run $0 again."
  [ ! -f "$stamp" ] || read -r old_key extras <"$stamp" || true
  case ",$extras," in
    *",$extra,"*) ;;
    *) if [ -n "$extra" ]; then extras="${extras:+$extras,}$extra" old_key=""; fi ;;
  esac
  [ "$old_key" != "$key" ] || return 0
  check_python "$python" "Remove '$venv' and run $0 again, or name another folder with VENV=FOLDER."
  rm -f "$stamp"
  install_project "$extras"
  printf '%s %s\n' "$key" "$extras" >"$stamp.part"
  mv "$stamp.part" "$stamp"
}

# Stops when the environment $1 was made by another Python than the one that PYTHON names.
same_python() {
  local show='import sys; print("%d.%d" % sys.version_info[:2])' has asked
  asked="$("$PYTHON" -c "$show")" || die "PYTHON='$PYTHON' does not run."
  has="$("$python" -c "$show")" || die "'$python' does not run: remove '$1' and run $0 again."
  [ "$has" = "$asked" ] ||
    die "'$1' is an environment of Python $has, and PYTHON='$PYTHON' is Python $asked:" \
      "name another folder with VENV=FOLDER, or remove '$1'."
}
