# make demo       train RoPE and RoVE on this machine, compare them, write a report
# make test       environment, lint, fast tests (under 10 minutes on 2 cores)
# make test-slow  the rest of the tests
# Everything happens in .venv; `make clean` removes it (never your data or runs).

PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check install -q

.PHONY: demo test test-slow lint clean

demo: .venv/user
	.venv/bin/python -m scripts.experiment experiments/demo.toml

test: lint
	.venv/bin/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: .venv/dev
	.venv/bin/python -m pytest -m slow

lint: .venv/dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

# a stamp file says what was installed; a changed requirements file installs anew
.venv/user: requirements.txt requirements-ruler.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	$(PIP) --no-deps -r requirements-ruler.txt
	@touch $@

.venv/dev: .venv/user requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
