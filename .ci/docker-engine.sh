#!/usr/bin/env bash
# Makes sure that a Docker engine answers: uses the one that runs, else installs and starts one.
# Installs only as root on Debian or Ubuntu. Prints what it did; ends with another code than 0, and
# the reason, when no engine answers. The engine's pid is in $PID_FILE, its log in $LOG.
#   usage: .ci/docker-engine.sh            stop it later: kill "$(cat /tmp/groupstream-dockerd.pid)"
set -euo pipefail

LOG=${DOCKERD_LOG:-/tmp/groupstream-dockerd.log}
PID_FILE=${DOCKERD_PID_FILE:-/tmp/groupstream-dockerd.pid}
ANSWER_S=${DOCKERD_ANSWER_S:-60}
INSTALL_S=600
APT_LOCK_S=120

fail() { echo "docker-engine: $*" >&2; exit 1; }
answers() { timeout 10 docker info --format '{{.ServerVersion}}' 2>/dev/null; }

install_engine() {
  [ "$(id -u)" -eq 0 ] || fail "no Docker engine answers, and only root can install one: install Docker, or start it"
  command -v apt-get >/dev/null || fail "no Docker engine answers, and this is no Debian: install Docker, or start it"
  echo "docker-engine: installing docker.io (output in $LOG)"
  local apt=(apt-get -y -o "DPkg::Lock::Timeout=$APT_LOCK_S")
  DEBIAN_FRONTEND=noninteractive timeout "$INSTALL_S" "${apt[@]}" update >>"$LOG" 2>&1 ||
    fail "apt-get update failed: $(tail -n 1 "$LOG")"
  # a package's start script finds no init system in a container: its refusal is no failure
  DEBIAN_FRONTEND=noninteractive timeout "$INSTALL_S" \
    "${apt[@]}" install --no-install-recommends docker.io iptables >>"$LOG" 2>&1 ||
    fail "apt-get install docker.io failed: $(tail -n 1 "$LOG")"
}

start_engine() {
  [ "$(id -u)" -eq 0 ] || fail "no Docker engine answers, and only root can start one"
  # a session of its own: Ctrl-C in the terminal is not for the engine
  setsid nohup dockerd --pidfile "$PID_FILE" >>"$LOG" 2>&1 </dev/null &
  local engine=$!
  for ((waited = 0; waited < ANSWER_S; waited++)); do
    if version=$(answers); then
      echo "docker-engine: started $version after $waited s (log $LOG, pid $(cat "$PID_FILE"))"
      return
    fi
    kill -0 "$engine" 2>/dev/null || fail "dockerd ended: $(tail -n 3 "$LOG")"
    ((waited > 0 && waited % 5 == 0)) && echo "docker-engine: waiting for dockerd ($waited s)"
    sleep 1
  done
  kill "$engine" 2>/dev/null || true
  fail "dockerd did not answer within $ANSWER_S s; its log is $LOG"
}

if command -v docker >/dev/null && version=$(answers); then
  echo "docker-engine: $version runs already"
  exit 0
fi
[ -z "${DOCKER_HOST:-}" ] ||
  fail "DOCKER_HOST is $DOCKER_HOST, where no engine answers: start that one, or unset DOCKER_HOST"
if ! command -v dockerd >/dev/null || ! command -v docker >/dev/null; then
  install_engine
fi
start_engine
