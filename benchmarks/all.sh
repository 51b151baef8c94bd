#!/usr/bin/env bash
# Make the results of one GPU in results/, part by part, within a time limit. Runs of tables and factors that are recorded
# there are not repeated; timings (stream, scale) are measured again.
#
#   LONGTAIL_DATA=... TINY=... COUNTS=... bash benchmarks/all.sh SECONDS PART...
#
# LONGTAIL_DATA: the folder that contains cifar-100-python. TINY: Tiny-ImageNet-LT, an image folder with train/ and val/. COUNTS:
# a JSON file with class counts of the large data sets (benchmarks/scale.py). Run folders are written to runs/, and the output to
# runs/PART.log.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
end=$((SECONDS + $1))
shift
mkdir -p runs

call() { timeout -s INT -k 20 $((end - SECONDS)) python3 "$@"; }
table() { call -c "import longtail; longtail.reproduce($1, minutes=$((end - SECONDS)) / 60)"; }

part() {
  case $1 in
    stream) call benchmarks/stream.py --tiles "$TINY" --profile --out results/stream.json ;;
    seeds) table "'cifar100-lt', methods=['paco', 'balanced-softmax'], seeds=range(8)" ;;
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
