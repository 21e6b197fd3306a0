# make test shows that everything works on this machine, make check is what a change is judged by, and
# make nightly asks the same questions for hours. CONTRIBUTING.md has a table of them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # -race and the linter fill a small machine each by themselves

# The modules find each other by replace, not by a workspace that only one
# machine has; and no program made here is stamped with the state of git, which
# needs a repository that git trusts.
export GOWORK := off
export GOFLAGS += -buildvcs=false
# The race detector would wait for a second at the end of each of sixty test programs.
export GORACE := atexit_sleep_ms=10

BIN := $(CURDIR)/.bin
TESTFLAGS ?=

# In a git checkout what is ignored is left out; from an archive there is only find.
FILES := { git ls-files --cached --others --exclude-standard 2>/dev/null || find . -type f -not -path './.*'; } | sed 's,^\./,,' | sort -u
# Folders of all modules but the tools' own, . for the root, new ones included.
MODULES = $(shell $(FILES) | grep -E '(^|/)go\.mod$$' | grep -vE '^tools/|^e2e/jaeger/|(^|/)testdata/' | \
	while read -r f; do [ ! -f "$$f" ] || dirname "$$f"; done | sort)
# What make test leaves to make check. The controllers' modules need Kubernetes, whose hundreds of packages take
# longer to compile than all the rest, and the simulator's tests make many calls.
CONTROLLERS = reconcile examples/reconciler
SIMULATOR = cmd/herd
MODULES_UNIT = $(filter-out $(CONTROLLERS) $(SIMULATOR),$(MODULES))
# Controllers do not run on 32 bits.
MODULES_386 = $(filter-out $(CONTROLLERS),$(MODULES))
PROTOS = $(shell find proto -name '*.proto')

# $(call each-module,command) runs the command in every module that has packages, and
# $(call each-module,command,modules) in some.
each-module = for m in $(or $(2),$(MODULES)); do \
		echo "[$$m] $(1)"; started=$$SECONDS; \
		packages=$$(cd "$$m" && go list ./...); \
		if [ -n "$$packages" ]; then (cd "$$m" && $(1)); fi; \
		echo "[$$m] $$((SECONDS - started)) s"; \
	done

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# $(call stages,targets) makes them one after the other, and says which and how long each takes.
stages = @.ci/stages $(1)

.PHONY: test
test: ## does it work on this machine: formatting, go vet and the tests, with the race detector (2 minutes on a bare machine)
	$(call stages,fmt-check unit)
	@echo "left to make check: the tests of $(SIMULATOR), which make many calls, and of $(CONTROLLERS), which need Kubernetes"

.PHONY: check
check: ## is a change good: make test, and the linter, generated files, 32 bits, real servers, faults, the documents' commands (.ci/run runs this)
	$(call stages,test simulations controllers lint generate-check tidy-check test-386 e2e browser soak-short documents vulncheck)

.PHONY: nightly
nightly: ## the same questions for three hours: many draws, fuzzing, grpc-go's own tests, 32 bits, the oldest and the newest dependencies, a rehearsed release, all benchmarks once
	$(call stages,random simulations-race test-386-rest fuzz-short grpc-suite test-oldest test-newest release-rehearsal bench-once soak)

.PHONY: fmt-check
fmt-check: ## every Go file is formatted by gofmt
	@unformatted=$$($(FILES) | grep '\.go$$' | while read -r f; do [ ! -f "$$f" ] || echo "$$f"; done | xargs -r gofmt -l); \
	if [ -n "$$unformatted" ]; then \
		echo "not formatted, run gofmt -w on:" >&2; echo "$$unformatted" >&2; exit 1; \
	fi; \
	echo "gofmt: all formatted"

.PHONY: generate-check
generate-check: $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc protoc ## committed generated files are what their sources give
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; mkdir -p "$$tmp"/{want,got}; \
	$(call protoc-into,$$tmp/want); \
	go run testdata/a6/generate.go -dir "$$tmp/want/testdata/a6"; \
	{ find proto -name '*.pb.go'; (cd "$$tmp/want" && find testdata -type f); } | sort | \
		while read -r f; do [ ! -f "$$f" ] || install -D -m 644 "$$f" "$$tmp/got/$$f"; done; \
	if ! diff -ruN -I '^//[- 	]*protoc  *v' "$$tmp/got" "$$tmp/want"; then \
		echo "generated files are out of date: run make generate" >&2; exit 1; \
	fi; \
	echo "generated files are up to date"

.PHONY: tidy-check
tidy-check: ## go.mod and go.sum are tidy in every module
	@$(call each-module,go mod tidy -diff)

.PHONY: lint
lint: $(BIN)/golangci-lint ## golangci-lint with .golangci.yml in every module
	@$(call each-module,$(BIN)/golangci-lint run --config $(CURDIR)/.golangci.yml --build-tags e2e ./...)

# .ci/race runs the tests again if it was the race detector that crashed.
race = $(CURDIR)/.ci/race go test -race
# -vet=all is go vet on what go test has compiled anyway.
test-race = $(race) -vet=all $(TESTFLAGS) ./...

.PHONY: unit
unit: gcc ## the tests of every module but the simulator's and the controllers', with the race detector, and go vet
	@$(call each-module,$(test-race),$(MODULES_UNIT))

.PHONY: simulations
simulations: ## the simulator's tests, which are too slow with the race detector, and go vet
	@$(call each-module,go test -vet=all $(TESTFLAGS) ./...,$(SIMULATOR))

.PHONY: controllers
controllers: gcc ## the tests of the modules that need Kubernetes, with the race detector, and go vet
	@$(call each-module,$(test-race),$(CONTROLLERS))

.PHONY: simulations-race
simulations-race: gcc ## the same with the race detector, and on 32 bits
	cd $(SIMULATOR) && $(race) -timeout 20m ./internal/sim -thorough
	@$(call on-32-bits,cd $(SIMULATOR) && GOARCH=386 CGO_ENABLED=0 go test -timeout 10m ./...)

.PHONY: random
random: gcc ## all random tests with many draws
	$(race) -timeout 30m $(TESTFLAGS) . ./internal/judges -thorough
	$(race) -timeout 20m -run 'TestScopesMatchTheirModel|ServiceConfig' . -scopes.draws=2000 -configs.draws=300
	go test $(TESTFLAGS) ./internal/serviceconfig ./internal/explore -thorough

.PHONY: test-386
test-386: ## vet the library as a 32-bit program, and run its short tests so, where this machine can
	GOARCH=386 CGO_ENABLED=0 go vet ./...
	@$(call on-32-bits,GOARCH=386 CGO_ENABLED=0 go test -short -timeout 5m . ./internal/judges)

.PHONY: test-386-rest
test-386-rest: ## vet every module as 32-bit programs, and run their short tests so, but the simulator's
	@$(call each-module,GOARCH=386 CGO_ENABLED=0 go vet -tags e2e ./...,$(MODULES_386))
	@$(call on-32-bits,$(call each-module,GOARCH=386 CGO_ENABLED=0 go test -short -timeout 5m ./...,$(filter-out $(SIMULATOR),$(MODULES_386))))

# A kernel may be built without 32-bit programs, so that only running one tells.
on-32-bits = if GOARCH=386 CGO_ENABLED=0 go test -run '^$$' ./internal/tried >/dev/null 2>&1; then $(1); \
	else echo "32-bit programs do not run on this machine: they are vetted only"; fi

# The modules that ask their users for as little as they can: their go.mod has the oldest versions with which their
# tests pass. All other modules have the newest ones.
MODULES_OLD = . attemptspan

.PHONY: test-oldest
test-oldest: ## the short tests with the oldest Go, grpc-go and OpenTelemetry that go.mod allows (downloads them)
	@export GOTOOLCHAIN=go$$(go list -m -f '{{.GoVersion}}'); go version; \
	$(call each-module,go test -vet=all -short -timeout 5m ./...,$(MODULES_OLD))

.PHONY: test-newest
test-newest: ## the same with the newest Go, and the newest versions of all dependencies (downloads them)
	@export GOTOOLCHAIN=go$$(go list -m -f '{{.Version}}' go@latest); go version; \
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(call each-module,cp go.mod go.sum "$$tmp" && \
		go get -modfile="$$tmp/go.mod" $$(go list -m -f '{{if not (or .Main .Indirect .Replace)}}{{.Path}}@latest{{end}}' all) && \
		go test -modfile="$$tmp/go.mod" -vet=all -short -timeout 5m ./...,$(MODULES_OLD))

.PHONY: fuzz-short
fuzz-short: ## every Fuzz function for FUZZTIME (30s)
	@.ci/fuzz $(or $(FUZZTIME),30s) $(MODULES)

.PHONY: fuzz
fuzz: ## the same for FUZZTIME (1h); new inputs that fail are kept under testdata/fuzz
	@.ci/fuzz $(or $(FUZZTIME),1h) $(MODULES)

.PHONY: demo
demo: ## build and run examples/demo
	cd examples/demo && go run . </dev/null

.PHONY: demo-page
demo-page: ## the same, with the debug page on http://localhost:8080 until Ctrl-C
	cd examples/demo && go run . -http localhost:8080 </dev/null

.PHONY: production
production: curl ## run the server and the client of examples/production, with calls, a reload and a restart (a few seconds)
	@examples/production/try

.PHONY: e2e
e2e: $(BIN)/jaeger prometheus gcc ## a real Jaeger and a real Prometheus return what they received; the documents' Go code compiles; calls survive outages; retries on four layers do not multiply; retries and hedges meet other replicas
	@cd e2e && E2E_JAEGER=$(BIN)/jaeger $(race) -tags e2e $(call only-tagged,.) -count=1 -timeout 10m -v .
# Without the race detector, with which many servers are too slow on a small machine.
	@cd bench && go test -tags e2e $(call only-tagged,./outages) -count=1 -timeout 5m -v ./outages
	@cd e2e && go test -tags e2e $(call only-tagged,./layers) -count=1 -timeout 5m -v ./layers
# Without it, too, because gRPC's xDS client takes long to compile.
	@cd e2e && go test -tags xds -count=1 -timeout 5m -v ./outlier
	@cd examples/tail && go run . -calls 1500

# The tests without a build tag run in unit.
only-tagged = -skip "^($$(go test -race -list . $(1) | grep '^Test' | paste -sd '|'))$$"

MODES ?= nothing timeout observer hedging default
.PHONY: grpc-suite
grpc-suite: ## grpc-go's own tests with the library on every ClientConn, in MODES (all: a quarter of an hour)
	@go run ./cmd/grpc-suite -modes '$(MODES)' -testflags '$(TESTFLAGS)'

.PHONY: browser
browser: chromium ## the debug page in a real headless Chromium
	@cd e2e/browser && go test -tags e2e -count=1 -timeout 10m -v .

.PHONY: browser-picture
browser-picture: chromium ## take the picture of the debug page in docs/ again
	@cd e2e/browser && go test -tags e2e -count=1 -run Screenshot . -screenshot $(CURDIR)/docs/debug-page.png

.PHONY: docs-pictures
docs-pictures: $(BIN)/jaeger ## draw the traces in docs/ again, from a new run against Jaeger
	@cd e2e && E2E_JAEGER=$(BIN)/jaeger E2E_KEEP_TRACES=$(CURDIR)/e2e/waterfall/testdata \
		go test -tags e2e -count=1 -run Jaeger . && go test -count=1 ./waterfall -update
	@echo "drew docs/trace.svg and docs/layers-trace.svg"

.PHONY: services-pictures
services-pictures: ## draw the pictures of docs/services.md again
	@cd bench && go run ./services -layers ../docs/layers.svg -deadlines ../docs/deadlines.svg

.PHONY: tail
tail: ## show what hedging does to slow responses, and the balancer to a slow server, on real servers (half a minute)
	cd examples/tail && go run .

.PHONY: reconciler
reconciler: ## a controller and client-go's default rate limiter side by side, in an outage (20 seconds)
	cd examples/reconciler && go run .

.PHONY: outages
outages: ## servers that fail, are killed or never there, under six clients, ours among them (half a minute)
	@cd bench && go run ./outages

.PHONY: outages-docs
outages-docs: ## the same, and write the tables of docs/outages.md and README.md again
	@cd bench && go run ./outages -markdown ../docs/outages.md -readme ../README.md

DURATION ?= 20s
CALLS ?= 10000000
.PHONY: soak-calls
soak-calls: $(BIN)/soak ## calls under faults for DURATION (20s), with ledgers on both sides; ARGS="-seed 1" and more with ARGS=-h
	@$(BIN)/soak -duration '$(DURATION)' $(ARGS)

.PHONY: soak-short
soak-short: ## the same for a minute
	@$(MAKE) soak-calls DURATION=1m

.PHONY: soak-docs
soak-docs: $(BIN)/soak ## the same until CALLS (ten million) were made, and write the figures of docs/reliability.md again (half an hour)
	@$(BIN)/soak -duration 6h -calls '$(CALLS)' -markdown docs/reliability.md $(ARGS)

.PHONY: layers
layers: ## what becomes of one call when four real services in a row retry it (20 seconds)
	@cd e2e && go run ./layers $(ARGS)

.PHONY: herd
herd: $(BIN)/herd ## what retries do to a server that recovers; ARGS="-study budget" and more in docs/herd.md
	@$(BIN)/herd $(ARGS)

.PHONY: explain
explain: $(BIN)/herd ## what calls experience under a policy, on one page; ARGS="-policy service-config.json" and more with ARGS=-h
	@$(BIN)/herd explain $(ARGS)

.PHONY: herd-docs
herd-docs: $(BIN)/herd ## write the pictures and figures of docs/herd.md again
	@$(BIN)/herd -docs docs

.PHONY: generate
generate: $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc protoc ## make the generated code and test vectors again
	@$(call protoc-into,.)
	@go run testdata/a6/generate.go -dir testdata/a6
	@echo "generated proto and testdata/a6"

.PHONY: explain-golden
explain-golden: ## write the pages in cmd/herd/testdata/explain again
	@cd cmd/herd && go test -count=1 -run ExplainGolden . -update

.PHONY: flaky
flaky: gcc ## the tests of timing 100 times with the race detector (10 minutes)
	$(race) -short -count=100 -timeout 30m -skip '$(SLOW)' . ./internal/judges
# Tests of numbers are slow, and not about timing.
SLOW := ^Test(RatioBudget|Quantile|Backoff|TooManyMethods)

.PHONY: soak
soak: gcc ## 100,000 random hedged calls, ten million stream programs on one, two and eight processors, 200,000 calls under faults, and 50,000 service configs (two hours)
	$(race) -run TestHedgingAtRandom -v -timeout 60m . \
		-hedges.seed=0 -hedges.sequences=100000
	$(race) -run 'TestStreamPrograms' -cpu 1,2,8 -v -timeout 60m ./internal/judges -programs.seed=0 -programs.count=350000
	go test -run 'TestStreamPrograms' -cpu 1,2,8 -v -timeout 120m ./internal/judges -programs.seed=0 -programs.count=3400000
	$(race) -run 'TestDifferential|TestFaults$$' -v -timeout 120m ./internal/judges -differential.seed=0 -differential.programs=100000 -faults.seed=0 -faults.streams=200000 -faults.worlds=8
	$(race) -run 'ServiceConfig' -v -timeout 60m . -configs.seed=0 -configs.draws=50000

RUNS ?= 10
.PHONY: bench
bench: $(BIN)/benchstat ## all ways to retry side by side, RUNS (10) times: writes docs/performance.* and what was measured of the goals in docs/design.md (a quarter of an hour, leave the machine alone)
	@bench/run $(RUNS) $(BIN)/bench.txt
	@$(BIN)/benchstat -ignore run,load,date -col /client $(BIN)/bench.txt >$(BIN)/benchstat.txt
	@cd bench && go run ./path -picture ../docs/path.svg && go run ./report \
		-chart ../docs/performance.svg -page ../docs/performance.md -goals ../docs/design.md $(BIN)/bench.txt
	@echo "wrote docs/performance.*; all figures are in .bin/benchstat.txt"

.PHONY: bench-quick
bench-quick: ## the same once and roughly, in half a minute: prints the tables, writes nothing
	@mkdir -p $(BIN); bench/run 1 $(BIN)/bench-quick.txt short
	@cd bench && go run ./report $(BIN)/bench-quick.txt

.PHONY: bench-once
bench-once: ## every benchmark of every module is compiled and run once; nothing is judged
	@$(call each-module,go test -run '^$$' -bench . -benchtime 1x -short ./...)

# govulncheck asks https://vuln.go.dev, and nothing else: the module proxy has no mirror of it.
.PHONY: vulncheck
vulncheck: $(BIN)/govulncheck ## known vulnerabilities that the code of any module can reach, if https://vuln.go.dev can be reached
	@if timeout 10 bash -c '</dev/tcp/vuln.go.dev/443' 2>/dev/null; then \
		$(call each-module,$(BIN)/govulncheck ./...); \
	else \
		echo "not run: the vulnerability database https://vuln.go.dev cannot be reached from this machine"; \
	fi

.PHONY: documents
documents: ## the make commands of README.md and CONTRIBUTING.md work
	@.ci/documents

.PHONY: release-check
release-check: ## make release VERSION=... on a copy of the committed tree, and go get and go install the result as a stranger
	@cd e2e/release && go test -tags e2e -count=1 -timeout 10m -v . -version '$(VERSION)'

.PHONY: release-rehearsal
release-rehearsal: ## the same with a version of its own
	@$(MAKE) release-check VERSION=v0.1.0

.PHONY: release
release: ## commit and tag VERSION of all modules, here only; CONTRIBUTING.md has all steps
	@.ci/release '$(VERSION)'

.PHONY: tools
tools: $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc $(BIN)/benchstat $(BIN)/govulncheck $(BIN)/golangci-lint ## build the tools into .bin

.PHONY: clean
clean: ## remove .bin
	rm -rf $(BIN)

# What follows is not in the list: programs that the targets above need.

# Built again only when something has changed, so that a second run starts immediately.
$(BIN)/herd: $(wildcard *.go go.mod cmd/herd/*.go cmd/herd/go.mod cmd/herd/internal/*/*.go)
	@mkdir -p $(BIN); cd cmd/herd && go build -o $@ .

.PHONY: $(BIN)/soak
$(BIN)/soak: # go build knows what has changed
	@mkdir -p $(BIN); cd cmd/soak && go build -o $@ .

# $(call protoc-into,folder) writes the generated code below folder.
protoc-into = protoc --plugin=$(BIN)/protoc-gen-go --plugin=$(BIN)/protoc-gen-go-grpc \
		--go_out=$(1) --go_opt=paths=source_relative \
		--go-grpc_out=$(1) --go-grpc_opt=paths=source_relative $(PROTOS)

.PHONY: protoc
protoc:
	@.ci/need protoc protobuf-compiler

.PHONY: curl
curl:
	@.ci/need curl curl

.PHONY: chromium
chromium:
	@.ci/need chromium chromium

.PHONY: prometheus
prometheus:
	@.ci/need promtool prometheus

# The race detector needs cgo.
unit controllers simulations-race random flaky soak e2e: export CGO_ENABLED := 1
.PHONY: gcc
gcc:
	@.ci/need gcc gcc libc6-dev

# A tool is built when it is missing or when its module has changed. Versions
# are pinned there: raise one at a time.
$(BIN)/golangci-lint: package := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(BIN)/protoc-gen-go: package := google.golang.org/protobuf/cmd/protoc-gen-go
$(BIN)/protoc-gen-go-grpc: package := google.golang.org/grpc/cmd/protoc-gen-go-grpc
$(BIN)/govulncheck: package := golang.org/x/vuln/cmd/govulncheck
$(BIN)/benchstat: package := golang.org/x/perf/cmd/benchstat
$(BIN)/jaeger: package := github.com/jaegertracing/jaeger/cmd/all-in-one

build-tool = @mkdir -p $(BIN); echo "building $(@F) into .bin ($(1))"; cd $(<D) && go build -o $@ $(package) && touch $@

$(BIN)/golangci-lint: tools/golangci-lint/go.mod tools/golangci-lint/go.sum
	$(call build-tool,once; about two minutes when nothing is cached)

$(BIN)/jaeger: e2e/jaeger/go.mod e2e/jaeger/go.sum
	$(call build-tool,once; about three minutes when nothing is cached)

$(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc $(BIN)/benchstat $(BIN)/govulncheck: tools/go.mod tools/go.sum
	$(call build-tool,once)
