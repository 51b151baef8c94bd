from longtail.cli import console_script

console_script()
