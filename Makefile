# Everything happens in this tree: the environment in .venv, everything built in build.
# `make demo` and `make test` need python3 >= 3.11 (with headers), a C++20 compiler and make; pip fetches the rest.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # the steps share .venv; compilers and tests run in parallel by themselves
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# What has been done to .venv; gone with it.
STAMPS := .venv/stamps
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
INSTALL := tools/install
OUTSIDE := $(PATH)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
# pytest keeps the tests that it has rewritten; else each of its processes rewrites them, for 10 s.
unexport PYTHONDONTWRITEBYTECODE

NATIVE := $(shell find csrc python/shoal -name '*.cc' -o -name '*.h' -o -name '*.pyx' -o -name '*.pxi' 2>/dev/null)
PACKAGE := $(NATIVE) $(shell find csrc python/shoal -type d -not -name __pycache__ -o -name '*.py' -o -name '*.pyi' 2>/dev/null) \
           pyproject.toml CMakeLists.txt LICENSE $(wildcard licenses/*)
CPP := $(shell find csrc tests/cpp bench/cpp examples python/shoal -name '*.cc' -o -name '*.h' 2>/dev/null)
PYX := $(shell find python/shoal -name '*.pyx' -o -name '*.pxi' 2>/dev/null)

say = @printf '==> %s\n'

.PHONY: help demo test prepare install wheel check-wheels lint format types cpp py fast slow long ray-versions sim asan tsan thread-safety fuzz fuzz-corpus docs bench clean

help:
	@echo 'make demo    build, install into .venv, train on a synthetic click log, draw the learning curve into build/demo'
	@echo '             (a real file: make demo DATA=path FORMAT=libsvm|criteo)'
	@echo 'make test    lint, types, layers, the fast Python tests'
	@echo 'make lint | types | fast        one part of it'
	@echo 'make slow    the Python tests that take seconds, start processes, or need an object store or Ray; make py: fast and slow'
	@echo 'make cpp     the C++ tests'
	@echo 'make long    the tests that make test leaves out, and more random examples: other settings, seeds and sizes of'
	@echo '             what it tests'
	@echo 'make ray-versions               the Python tests on Ray, with the earlier versions RAY_VERSIONS=...'
	@echo 'make sim     failures of a simulated cluster with replicas: SEEDS=10 of each scenario (tests/support/sim/sweep.py)'
	@echo 'make asan | tsan                the C++ tests under the sanitizers'
	@echo 'make thread-safety              whether each thread holds the mutexes of what it uses (csrc/base/mutex.h)'
	@echo 'make fuzz    fuzz the parsers of text; make fuzz-wire fuzz-service: what peers send (tests/fuzz/README.md)'
	@echo 'make wheel   wheels for this architecture, in dist: PYTHONS=python3.12, ARCH=aarch64 to cross-compile'
	@echo 'make check-wheels               the tests of those wheels: WHEELS=dist/..., FAST=1, CPP_ARCH=aarch64'
	@echo 'make docs    the documentation site, in build/docs'
	@echo 'make bench   the benchmarks of bench/'
	@echo 'make format  rewrite the sources as the formatters want them'
	@echo 'make clean   remove build and .venv'

# ---- the environment ----

$(STAMPS)/venv: | tools/find_python
	@python=$$(PATH='$(OUTSIDE)' tools/find_python) && \
	    printf '==> .venv: %s\n' "$$($$python --version) at $$python" && \
	    $$python -m venv .venv
	@$(PIP) install --no-compile -r requirements/uv.txt || echo '    without uv: pip takes ten times as long'
	@mkdir -p $(@D) && touch $@

$(STAMPS)/build-tools: requirements/build.txt $(STAMPS)/venv
	@for compiler in "$${CXX:-c++}" g++ clang++; do command -v $$compiler >/dev/null && exit; done; \
	    echo 'No C++ compiler: install g++ >= 12 or clang >= 14, or set CXX' >&2; exit 1
	$(say) '.venv: build tools'
	@$(INSTALL) -r requirements/build.txt
	@touch $@

$(STAMPS)/dev-tools: requirements/dev.txt $(STAMPS)/build-tools
	$(say) '.venv: test tools'
	@$(INSTALL) -r requirements/dev.txt
	@touch $@

# A missing torch is no failure: the tests that compare with it skip, and say so.
$(STAMPS)/torch: requirements/torch.txt $(STAMPS)/dev-tools
	$(say) '.venv: torch, for shoal.torch and as an oracle'
	@plan=$$($(INSTALL) --dry-run -r requirements/torch.txt 2>&1); \
	case "$$plan" in \
	    *'Would install'*nvidia-*) echo '    left out: only a CUDA build is on offer here (requirements/torch.txt has the command for a CPU build)' ;; \
	    *'Would install'*) $(INSTALL) -r requirements/torch.txt || echo '    left out: it could not be installed' ;; \
	    *'already satisfied'* | *'Would make no changes'*) ;; \
	    *) echo '    left out: there is no torch for this machine' ;; \
	esac
	@touch $@

# For the tests of deploy/prometheus and deploy/grafana, which skip without.
$(STAMPS)/prometheus: tools/get_prometheus $(STAMPS)/build-tools
	$(say) '.venv: prometheus'
	@tools/get_prometheus .venv || true
	@touch $@

$(STAMPS)/wheel: $(PACKAGE) $(STAMPS)/build-tools
	$(say) 'building shoal'
	@rm -rf build/wheel
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@touch $@

$(STAMPS)/install: $(STAMPS)/wheel
	$(say) 'installing shoal into .venv'
	@$(INSTALL) --no-deps --force-reinstall build/wheel/shoal-*.whl
	@$(INSTALL) 'shoal[plot]'
	@touch $@

$(STAMPS)/docs: requirements/docs.txt $(STAMPS)/dev-tools
	$(say) '.venv: documentation tools'
	@$(INSTALL) -r requirements/docs.txt
	@touch $@

install: $(STAMPS)/install

# ---- wheels for x86-64 and ARM: tools/build_wheels.py, tools/check_wheels.py ----

$(STAMPS)/wheel-tools: requirements/wheels.txt requirements/clang.txt $(STAMPS)/build-tools
	$(say) '.venv: tools for wheels'
	@$(INSTALL) -r requirements/wheels.txt
	@touch $@

wheel: $(STAMPS)/wheel-tools
	$(say) 'wheels: dist'
	@$(BIN)/python tools/build_wheels.py --jobs $(JOBS) $(if $(ARCH),--arch $(ARCH)) $(if $(PYTHONS),--python $(PYTHONS))

check-wheels: $(STAMPS)/wheel-tools
	$(say) 'tests of the wheels'
	@$(BIN)/python tools/check_wheels.py $(WHEELS) --jobs $(JOBS) $(if $(FAST),--fast) $(if $(CPP_ARCH),--cpp $(CPP_ARCH))

# ---- what users see first ----

demo: $(STAMPS)/install
	$(say) 'training; the results go to build/demo'
	@$(BIN)/python examples/demo.py $(if $(DATA),--data '$(DATA)' --format '$(or $(FORMAT),$(error DATA needs FORMAT=libsvm or FORMAT=criteo))') --output build/demo --overwrite

# ---- tests ----

# Compilers work while pip fetches what the tests need.
prepare: $(STAMPS)/build-tools
	@mkdir -p build; trap 'trap - INT TERM; kill 0' INT TERM; \
	$(MAKE) -s $(STAMPS)/wheel >build/wheel.log 2>&1 & building=$$!; \
	$(MAKE) -s $(STAMPS)/torch $(STAMPS)/prometheus; status=$$?; \
	wait $$building || status=$$?; \
	cat build/wheel.log; exit $$status

# The types are checked, by one thread, beside the tests; a shell has what is in the background ignore Ctrl-C, so that ends
# it.
test: prepare $(STAMPS)/install
	@start=$$(date +%s); failed=; mkdir -p build; \
	$(MAKE) lint || failed="$$failed lint"; \
	trap 'trap - INT TERM; kill 0' INT TERM; \
	$(MAKE) types >build/types.log 2>&1 & beside=$$!; \
	$(MAKE) fast || failed="$$failed fast"; \
	wait $$beside || failed="$$failed types"; \
	cat build/types.log; \
	took="$$(($$(date +%s) - start)) s"; \
	if [ -n "$$failed" ]; then echo "==> make test FAILED in$$failed, after $$took"; exit 1; fi; \
	echo "==> make test passed in $$took: lint, layers, types, the fast Python tests; make slow and make cpp run the others"

lint: $(STAMPS)/dev-tools
	$(say) 'lint: ruff, clang-format, cython-lint, codespell, layers'
	@ok=true; \
	$(BIN)/ruff check --quiet --output-format concise || ok=false; \
	$(BIN)/ruff format --quiet --check --output-format concise || ok=false; \
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP) || ok=false;) \
	$(if $(PYX),$(BIN)/cython-lint $(PYX) || ok=false;) \
	$(BIN)/codespell || ok=false; \
	$(BIN)/python tools/check_layers.py || ok=false; \
	$$ok

# torch's own functions have no annotations that a strict check of a training loop could use.
TYPED_EXAMPLES := $(filter-out examples/torch_% examples/ctr_%,$(wildcard examples/*.py))

types: $(STAMPS)/install $(STAMPS)/torch
	$(say) 'types: mypy, stubtest'
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    $(BIN)/mypy --no-error-summary && $(BIN)/mypy --no-error-summary $(TYPED_EXAMPLES); \
	else echo '    mypy left out: shoal.torch needs the types of torch, which is not here'; fi
	@$(BIN)/python -m mypy.stubtest --concise --allowlist tools/stubtest_allowlist.txt shoal._core shoal._reader

cpp: cpp-package cpp-dev
asan: cpp-asan
tsan: cpp-tsan

# A fixed address-space layout, where the system grants it: the thread sanitizer of older compilers needs one.
cpp-tsan: run = $(shell setarch -R true 2>/dev/null && echo setarch -R)

PRESETS := release dev asan tsan
.PHONY: $(PRESETS:%=compile-%) $(PRESETS:%=cpp-%)

# The engine that the package was linked with, not compiled again.
.PHONY: cpp-package
cpp-package: $(STAMPS)/install
	$(say) "C++: testing the package's engine (build/package)"
	@cmake --preset release -B build/package -D SHOAL_ENGINE=$$(ls -t $(CURDIR)/build/cp*/libshoal_core.a | head -n 1) \
	    --log-level=WARNING >/dev/null
	@cmake --build build/package --target shoal_tests -- --quiet
	@ctest --test-dir build/package --output-on-failure --no-tests=error --parallel $(JOBS)

$(PRESETS:%=compile-%): compile-%: $(STAMPS)/build-tools
	$(say) 'C++: compiling $* (build/$*)'
	@cmake --preset $* --log-level=WARNING >/dev/null
	@cmake --build --preset $* $(built) -- --quiet

# Benchmarks and the prediction library are run as users get them alone.
compile-dev compile-asan compile-tsan: built = --target shoal_tests

$(PRESETS:%=cpp-%): cpp-%: compile-%
	$(say) 'C++: testing $*'
	@$(run) ctest --preset $* --parallel $(JOBS)

# ---- locks: csrc/base/mutex.h ----

$(STAMPS)/clang: requirements/clang.txt $(STAMPS)/build-tools
	$(say) '.venv: clang'
	@$(INSTALL) -r requirements/clang.txt
	@touch $@

# `zig c++` would write objects: this is the clang inside, with the headers of the system's library of C++. It reads the
# sources as the package's build has put them together: those of the engine that have come to include mutex.h, and those
# of bind/ that name one, since parsing them all takes as long as the engine.
thread-safety: $(STAMPS)/clang $(STAMPS)/install
	$(say) 'C++: checking which mutexes are held'
	@zig=$$($(BIN)/python -c 'import ziglang, os; print(os.path.dirname(ziglang.__file__))') && \
	    headers=$$($(BIN)/python -m pybind11 --includes | sed 's/-I/-isystem /g') && \
	    boost=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.distribution("cmeel-boost").locate_file("cmeel.prefix/include"))') && \
	    built=$$(ls -td build/cp*/ | head -n 1) && \
	    sources=$$(ninja -C $$built -t deps | sed -n -e '/^[^ ]/{s|\.o: .*||;s|.*\.dir/csrc|csrc|;s|^CMake|'$$built'CMake|;h}' -e '/\/base\/mutex\.h$$/{g;p}') && test -n "$$sources" && \
	    { printf '%s\n' "$$sources" | grep -v /_core.dir/; grep -l Mutex csrc/bind/*.cc; } | \
	    xargs -P $(JOBS) -I{} $$zig/zig clang -x c++ -resource-dir $$zig/lib -std=c++20 \
	        -fsyntax-only -Wthread-safety -Werror=thread-safety -Wno-deprecated-declarations -DSHOAL_BUILD_TYPE='""' -DSHOAL_VERSION='""' -Icsrc $$headers -isystem $$boost {}

pytest_alone = $(BIN)/python -m pytest --quiet
# Slow tests wait for a third of their time, so that two cores have three processes; the fast ones do not wait, and each
# process imports all of them, for 15 s.
processes = $(shell expr '(' 3 '*' $(JOBS) + 1 ')' / 2)
fast: processes = $(JOBS)
pytest = $(pytest_alone) -n $(processes) --dist worksteal \
    $(patsubst %,--ignore=tests/ray/test_%.py,cluster nodes serve tune)

py: fast slow

fast: $(STAMPS)/install $(STAMPS)/torch $(STAMPS)/prometheus
	$(say) 'Python tests, but for the slow ones'
	@$(pytest) -m 'not slow and not ray and not long'

# Those on Ray, which mostly wait, run beside the others, in one process that starts clusters of Ray once.
slow: $(STAMPS)/install $(STAMPS)/torch $(STAMPS)/prometheus
	$(say) 'Python tests: the slow ones, and those on Ray'
	@mkdir -p build; trap 'trap - INT TERM; kill 0' INT TERM; \
	$(pytest_alone) -m 'ray and not long' tests/ray >build/ray.log 2>&1 & beside=$$!; \
	$(pytest) -m 'slow and not ray and not long'; status=$$?; \
	wait $$beside || status=$$?; \
	cat build/ray.log; exit $$status

long: $(STAMPS)/install $(STAMPS)/torch
	$(say) 'Python tests: the long ones'
	@SHOAL_ROUNDS=1 $(pytest) -m '(long or hypothesis or rounds) and not ray'
	@$(pytest_alone) -m 'long and ray' tests/ray

# Other versions of Ray than that of requirements/dev.txt, each in a copy of the environment that shares its files.
RAY_VERSIONS ?= 2.58.1 2.59.0

ray-versions: $(RAY_VERSIONS:%=ray-%)

ray-%: $(STAMPS)/install $(STAMPS)/dev-tools
	$(say) 'Python tests on Ray $* (build/ray-$*)'
	@rm -rf build/ray-$* && mkdir -p build && cp -al .venv build/ray-$*
	@build/ray-$*/bin/python -m pip --disable-pip-version-check --no-input -qq install 'ray[default,data,train,tune]==$*'
	@build/ray-$*/bin/python -m pytest --quiet -m ray -p no:cacheprovider

# ---- simulation: tests/support/sim/sweep.py ----

sim: SEEDS ?= 10
sim: FIRST ?= 0
sim: $(STAMPS)/install $(STAMPS)/dev-tools
	$(say) 'simulating failures: $(SEEDS) seeds of each scenario'
	@PYTHONPATH=tests/support $(BIN)/python -m sim.sweep --seeds $(SEEDS) --first $(FIRST) --jobs $(JOBS) --scenario '$(SCENARIO)'

# ---- fuzzing: tests/fuzz/README.md ----

FUZZED := wire service copies
.PHONY: $(FUZZED:%=fuzz-%) $(FUZZED:%=fuzz-%-corpus)

FUZZ := build/fuzz
FUZZ_CXX ?= clang++
SECONDS ?= 60
# What `address` leaves out; `undefined` as a whole asks for a runtime of clang's own version.
FUZZ_CHECKS := address,alignment,bool,bounds,integer-divide-by-zero,null,shift,signed-integer-overflow
fuzz_formats = $(or $(FORMAT),$(notdir $(wildcard tests/fuzz/corpus/*)))
fuzz_parsers = env LD_PRELOAD="$$($(BIN)/python -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so" \
    ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=8 PYTHONMALLOC=malloc PYTHONPATH=$(FUZZ)/site $(BIN)/python tests/fuzz/fuzz_parsers.py

$(STAMPS)/fuzz: $(PACKAGE) requirements/fuzz.txt $(STAMPS)/dev-tools
	$(say) 'building shoal for the fuzzer ($(FUZZ))'
	@$(INSTALL) -r requirements/fuzz.txt
	@CXX=$(FUZZ_CXX) $(PIP) install --no-deps --no-build-isolation --upgrade --target $(FUZZ)/site \
	    --config-settings=build-dir=$(FUZZ)/objects \
	    --config-settings=cmake.define.SHOAL_SANITIZE=fuzzer-no-link,$(FUZZ_CHECKS) .
	@touch $@

fuzz: $(STAMPS)/fuzz
	@set -e; for format in $(fuzz_formats); do \
	    printf '==> fuzzing %s for %s s\n' $$format '$(SECONDS)'; \
	    mkdir -p $(FUZZ)/found $(FUZZ)/corpus/$$format; \
	    $(fuzz_parsers) $$format -max_total_time=$(SECONDS) -max_len=600 -len_control=20 -dict=tests/fuzz/words.dict \
	        -artifact_prefix=$(FUZZ)/found/$$format- $(FUZZ)/corpus/$$format tests/fuzz/corpus/$$format; \
	done

fuzz-corpus: $(STAMPS)/fuzz
	@set -e; for format in $(fuzz_formats); do \
	    rm -rf $(FUZZ)/least && mkdir -p $(FUZZ)/least $(FUZZ)/corpus/$$format; \
	    cp tests/fuzz/corpus/$$format/example-* $(FUZZ)/least; \
	    $(fuzz_parsers) $$format -set_cover_merge=1 -use_counters=0 \
	        $(FUZZ)/least tests/fuzz/corpus/$$format $(FUZZ)/corpus/$$format; \
	    rm -rf tests/fuzz/corpus/$$format && mv $(FUZZ)/least tests/fuzz/corpus/$$format; \
	done

# What reads a peer's bytes is C++ alone: libFuzzer without Python.
FUZZ_NATIVE := $(CURDIR)/$(FUZZ)/native
fuzz_seeds_of = tests/fuzz/$*/corpus

$(FUZZED:%=$(FUZZ)/fuzz_%): $(FUZZ)/fuzz_%: $(NATIVE) $(wildcard tests/fuzz/*/*.cc tests/cpp/*_input.h)
	$(say) 'building the fuzzer of the $* ($@)'
	@mkdir -p $(FUZZ_NATIVE)
	@printf '%s\n' $(filter-out %/data_loop.cc %/stream_sockets.cc %/dealer.cc %/socket.cc %/zmq.cc,$(wildcard $(patsubst %,csrc/%/*.cc,base optim batch table policy shard tier wire transport replica endpoint))) \
	    tests/fuzz/$*/fuzz_$*.cc | xargs -P $(JOBS) -I{} sh -c '$(FUZZ_CXX) -std=c++20 -g -O1 -ffp-contract=off -DSHOAL_CHECKED -DSHOAL_SANITIZED \
	    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -Icsrc -Itests/cpp -c {} -o $(FUZZ_NATIVE)/$$(basename {} .cc).o'
	@$(FUZZ_CXX) -fsanitize=fuzzer,address,undefined $$(ls $(FUZZ_NATIVE)/*.o | grep -v -e /fuzz_) $(FUZZ_NATIVE)/fuzz_$*.o -pthread -o $@

$(FUZZED:%=fuzz-%): fuzz-%: $(FUZZ)/fuzz_%
	$(say) 'fuzzing the $* for $(SECONDS) s'
	@mkdir -p $(FUZZ)/found $(FUZZ)/corpus/$*
	@$(FUZZ)/fuzz_$* -max_total_time=$(SECONDS) -max_len=1000 -len_control=20 -artifact_prefix=$(FUZZ)/found/$*- \
	    $(FUZZ)/corpus/$* $(fuzz_seeds_of)

$(FUZZED:%=fuzz-%-corpus): fuzz-%-corpus: $(FUZZ)/fuzz_%
	@rm -rf $(FUZZ)/least && mkdir -p $(FUZZ)/least $(FUZZ)/corpus/$*
	@$(FUZZ)/fuzz_$* -set_cover_merge=1 -use_counters=$(if $(filter wire,$*),1,0) -max_len=1000 $(FUZZ)/least $(fuzz_seeds_of) $(FUZZ)/corpus/$*
	@rm -rf $(fuzz_seeds_of) && mv $(FUZZ)/least $(fuzz_seeds_of)

# ---- the documentation site: docs/decisions/0021-documentation-site.md ----

docs: $(STAMPS)/docs $(STAMPS)/install $(STAMPS)/torch
	$(say) 'documentation: build/docs/index.html'
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/docs-cache . build/docs

# ---- the rest ----

# Peers that cannot be installed are left out by their benchmarks, which say so.
bench: $(STAMPS)/install $(STAMPS)/torch compile-release
	@$(INSTALL) -r requirements/bench.txt || true
	@set -e; for script in bench/bench_*.py; do printf '==> %s\n' "$$script"; $(BIN)/python "$$script"; done
	$(say) 'bench/test_calls.py'
	@$(BIN)/python -m pytest --quiet --timeout 600 bench/test_calls.py

format: $(STAMPS)/dev-tools
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format
	@$(if $(CPP),$(BIN)/clang-format -i $(CPP))

clean:
	rm -rf build .venv
