# Sourced by the scripts: a virtual environment with the project in it.

python=${PYTHON:-python3}
apt_missing=()

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

check_python() {
    command -v "$python" >/dev/null || die "$python is not installed; Python 3.11 or newer is needed"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" --version 2>&1) is too old; set PYTHON to Python 3.11 or newer"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_missing+=(python3-venv)
}

# Adds what compiles mysqlclient.
compiler_packages() {
    command -v gcc >/dev/null || apt_missing+=(gcc libc6-dev)
    command -v pkg-config >/dev/null || apt_missing+=(pkg-config)
    pkg-config --exists libmariadb 2>/dev/null || apt_missing+=(libmariadb-dev)
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || apt_missing+=(python3-dev)
}

# Adds the programs of MariaDB, without a system service.
mariadb_package() {
    PATH=$PATH:/usr/sbin command -v mariadbd >/dev/null || apt_missing+=(mariadb-server-core)
}

can_apt() {
    command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null; }
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Installs the packages in apt_missing, if there are any.
apt_install() {
    [ ${#apt_missing[@]} -gt 0 ] || return 0
    can_apt || die "missing, and cannot be installed from here (Debian's names): ${apt_missing[*]}"
    say "installing with apt: ${apt_missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update </dev/null
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y --no-install-recommends install "${apt_missing[@]}" </dev/null >/dev/null
}

# postgresql_programs_only on|off: on, Debian's package brings its programs only. Otherwise it
# makes a database cluster and runs it as a system service, now and after every boot.
postgresql_programs_only() {
    local folder=/etc/postgresql-common/createcluster.d
    if [ "$1" = on ]; then
        as_root mkdir -p "$folder"
        echo 'create_main_cluster = false' | as_root tee "$folder/programs-only.conf" >/dev/null
    else
        as_root rm -f "$folder/programs-only.conf"
    fi
}

# programs_only on|off PACKAGE...: around an installation, so that a package whose service has its
# name brings its programs only: the service is not started, now or at a boot.
programs_only() {
    local how=$1 name
    shift
    for name; do
        if [ "$how" = on ]; then
            # Until the next boot, should this script end in between.
            [ ! -d /run/systemd/system ] || as_root systemctl --quiet mask --runtime "$name.service"
        else
            as_root update-rc.d "$name" disable >/dev/null 2>&1 || true
            if [ -d /run/systemd/system ]; then
                as_root systemctl --quiet unmask --runtime "$name.service"
            else
                as_root "/etc/init.d/$name" stop >/dev/null 2>&1 || true
            fi
        fi
    done
}

# is_installed VENV EXTRAS [REQUIREMENTS]: whether install_project has nothing to do.
is_installed() {
    [ -x "$1/bin/python" ] && [ "$(cat "$1/.installed" 2>/dev/null)" = "$(stamp "$@")" ]
}

stamp() {
    printf '%s %s %s %s' "$PWD" "$2" "${3-}" "$(cat setup.cfg pyproject.toml | cksum)"
}

# Whether the interpreter has a pip that installs into other environments. Debian's has none by default.
has_pip() {
    case "$("$python" -m pip --help 2>/dev/null)" in *'--python '*) ;; *) return 1 ;; esac
}

# install_project VENV EXTRAS [REQUIREMENTS]: the requirements are one argument, with spaces between them.
install_project() {
    local requirements
    is_installed "$@" && return
    say "installing sharded_orm[$2]${3:+ with $3} into $1"
    read -ra requirements <<<"${3-}"
    # --clear: a virtual environment that was copied or half made is of no use.
    # "set -e" does not hold here if the caller handles a failure.
    local pip=("$python" -m pip --python "$1/bin/python") own_pip=--without-pip
    # To install a pip takes three seconds. Only people use that of .venv.
    if [ "$1" = .venv ] || ! has_pip; then
        pip=("$1/bin/python" -m pip) own_pip=
    fi
    "$python" -m venv --clear $own_pip "$1" || return
    "${pip[@]}" install --quiet --disable-pip-version-check --no-input \
        -e ".[$2]" ${requirements[@]+"${requirements[@]}"} || return
    stamp "$@" >"$1/.installed"
}
