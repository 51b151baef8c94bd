#!/usr/bin/env bash
# Make the results of one GPU in results/, part by part, within a time limit. Runs of tables and factors that are recorded
# there are not repeated; timings (stream, scale) are measured again.
#
#   LONGTAIL_DATA=... TINY=... COUNTS=... bash benchmarks/all.sh SECONDS PART...
#
# LONGTAIL_DATA: the folder that contains cifar-100-python. TINY: Tiny-ImageNet-LT, an image folder with train/ and val/. COUNTS:
# a JSON file with class counts of the large data sets (benchmarks/scale.py). Run folders are written to runs/, and the output to
# runs/PART.log.
#
# seeds-10-best and later-bcl, later-proco, later-ncl (or later for the three) add seeds to the table of all methods. Expected
# seconds on one H200 from the recorded runs with three seeds, where five more seeds take 1.7 times as long: ride-4 680, ride-3 520,
# gpaco 140, balanced-softmax-supcon 100, the four others 75 each. BCL, ProCo and NCL were not measured; three times the
# time of cross-entropy would be 360 for eight seeds of each.
#
# record trains the trials of benchmarks/record.py; its arguments follow in RECORD, for example
#   RECORD="--only bs-2-views paco-2-views" bash benchmarks/all.sh 540 record
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
end=$((SECONDS + $1))
shift
mkdir -p runs

best="['logit-adjustment', 'logit-adjustment-post-hoc', 'crt', 'lws', 'balanced-softmax-supcon', 'gpaco']"

call() { timeout -s INT -k 20 $((end - SECONDS)) python3 "$@"; }
table() { call -c "import longtail; longtail.reproduce($1, minutes=$((end - SECONDS)) / 60)"; }

part() {
  case $1 in
    stream) call benchmarks/stream.py --tiles "$TINY" --profile --out results/stream.json ;;
    seeds) table "'cifar100-lt', methods=['paco', 'balanced-softmax'], seeds=range(8)" ;;
    seeds-10-best) # without PaCo and Balanced Softmax, which have eight seeds; RIDE takes most of the time
      table "'methods', methods=$best, seeds=range(8)" && table "'methods', methods=['ride-3', 'ride-4'], seeds=range(8)" ;;
    later) for method in bcl proco ncl; do part "later-$method"; done ;;
    later-*) table "'methods', methods=['${1#later-}'], seeds=range(8)" ;;
    record) call benchmarks/record.py --data "$LONGTAIL_DATA" --minutes "$(((end - SECONDS) * 100 / 60))e-2" ${RECORD:-} ;;
    schedule) call benchmarks/schedule.py --data "$LONGTAIL_DATA" ;;
    published | ablations) table "'$1'" ;;
    multitask) table "'cifar100', methods=['ce-supcon'], epochs=100" ;;
    tiny) table "'tiny-imagenet-lt', data_root='$TINY'" ;;
    epochs) call benchmarks/epochs.py --data "$LONGTAIL_DATA" --results results/epochs.json ;;
    alpha) call benchmarks/factors.py --data "$LONGTAIL_DATA" --only "alpha auto" "longer queue" ;;
    betas) call benchmarks/factors.py --data "$LONGTAIL_DATA" --only "CB-Focal" ;;
    scale) call benchmarks/scale.py --counts "$COUNTS" --out results/scale.json ;;
    gradients) call benchmarks/gradients.py --data "$LONGTAIL_DATA" ;;
    *) echo "no such part: $1" && return 2 ;;
  esac
}

for name in "$@"; do
  [ $((end - SECONDS)) -gt 20 ] || { echo "no time left for $name" && break; }
  echo "== $name, $((end - SECONDS)) s left"
  part "$name" 2>&1 | tee -a "runs/$name.log"
done
