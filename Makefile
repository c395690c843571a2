# Everything runs in .venv, which the first target to need it makes. Try: make demo, make test, make help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint types proto bench clean
.DELETE_ON_ERROR:

help:                       ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 12

setup: $(READY)             ## make the virtual environment with the pinned packages

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@# The oldest and the newest protobuf that must run the committed code, for the tests.
	@for v in 6.31.1 7.36.2; do \
	  $(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --upgrade \
	    --target $(VENV)/protobuf-$$v protobuf==$$v || exit 1; done
	@mkdir -p .types/fedreuse
	@for d in proto server client sim; do ln -sfn ../../$$d .types/fedreuse/$$d; done
	@touch $@

demo: $(READY)              ## a server and 5 client processes on real data, two methods side by side
	@rm -rf runs/demo
	$(BIN)/fedreuse launch method=topk-fedavg rounds=30 clients.processes=5 output=runs/demo/topk-fedavg
	$(BIN)/fedreuse launch method=dg-fedreuse rounds=30 clients.processes=5 output=runs/demo/dg-fedreuse
	$(BIN)/fedreuse compare runs/demo/topk-fedavg runs/demo/dg-fedreuse

test: $(READY)              ## the whole test suite
	$(BIN)/python -m pytest

lint: $(READY)              ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)             ## mypy, strict
	$(BIN)/mypy

proto: $(READY)             ## regenerate the protobuf code from proto/federation.proto
	@mkdir -p $(VENV)/gencode
	$(BIN)/python -m grpc_tools.protoc -Ifedreuse/proto=proto \
	  --python_out=$(VENV)/gencode --pyi_out=$(VENV)/gencode proto/federation.proto
	cp $(VENV)/gencode/fedreuse/proto/federation_pb2.py $(VENV)/gencode/fedreuse/proto/federation_pb2.pyi proto/

bench: $(READY)             ## cost of a round trip without training, against a bare gRPC exchange
	$(BIN)/python tests/bench/roundtrip.py

clean:                      ## remove what the targets above made, runs excepted
	rm -rf $(VENV) .types build *.egg-info
