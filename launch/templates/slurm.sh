{# The batch script of a run; see slurm.py, which quotes the values. #}
#!/bin/bash
# A run of spmdkit. The directory {{ logs }} must exist before you submit this.
{% for option in directives %}
#SBATCH {{ option }}
{% endfor %}

{% for name, value in variables.items() %}
{% if value is none %}
[ -n "{{ "${" ~ name ~ "+set}" }}" ] || {
    echo 'launch.environment.{{ name }} must be set in the shell that submits'
    exit 2
}
{% else %}
export {{ name }}={{ value }}
{% endif %}
{% endfor %}
{% for line in setup %}
{{ line }}
{% endfor %}

run={{ run }}
stopped=
trap 'stopped=1' TERM # scancel: the processes get the signal too, and save

latest() { # the latest step that has a checkpoint
    ls "$run/checkpoints" 2>/dev/null | grep -Ex '[0-9]+' | sort -n | tail -n 1
}

logs=$run/logs
mkdir -p "$logs" || exit {{ again }}
starts=$logs/slurm-$SLURM_JOB_ID.starts
step=$(latest)
echo "--- $(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1))" \
    "on $SLURM_JOB_NODELIST, from step ${step:-0}" | tee -a "$starts"
# The processes of every start read this copy of the config.
config={{ copy }}
partial=$config.$SLURM_JOB_ID
cat >"$partial" <<'{{ end }}' && mv "$partial" "$config" || exit {{ again }}
{{ config }}
{{- end }}
{% if source %}
source={{ source }}
digest=$(sha256sum 2>/dev/null <"$source")
case ${digest%% *} in
{{ digest }} | "") ;;
*) echo "$source has changed" {{ changed }} ;;
esac
{% endif %}
{% if fresh %}
# --fresh applies until the new run has written its config.yaml
mark=$logs/slurm-$SLURM_JOB_ID.fresh
[ -e "$mark" ] || : >"$mark"
fresh=--fresh
[ "$run/config.yaml" -nt "$mark" ] && fresh=
{% endif %}
messages=$logs/slurm-$SLURM_JOB_ID.srun
srun {{ options }} \
    --output={{ output }} \
    {{ command }}{{ " $fresh" if fresh }} 2>"$messages"
code=$?
cat "$messages" >&2

# The exit code of srun is mostly that of processes that it killed; its first message about one names the first failure.
first=$(sed -n 's/^srun: error: .*: tasks\{0,1\} \([0-9][^:]*: .*\)/\1/p' "$messages" | head -n 1)
rank=${first%%[!0-9]*}
case $first in
*": Exited with exit code "*) code=${first##* } ;;
?*) code={{ again }} ;; # killed by a signal
esac
[ "$code" -gt 128 ] && code={{ again }}
[ "$code" -eq 0 ] && exit 0
if [ -n "$rank" ]; then
    echo "rank $rank ended first: ${first#*: }. Its last lines, all of them in $logs/rank-$rank.log:"
    grep -Fv '[Gloo]' "$logs/rank-$rank.log" | tail -n 20
fi

{% if requeue %}
[ "$code" -eq {{ again }} ] || exit "$code" # another attempt would fail in the same way
if [ -n "$stopped" ]; then
    echo "job $SLURM_JOB_ID was canceled; the same command resumes the run"
    exit {{ again }}
fi
step=$(latest)
if [ "$(grep -c ", from step ${step:-0}\$" "$starts")" -gt {{ restarts }} ]; then
    echo "not restarted: {{ restarts }} restarts made no newer checkpoint than step ${step:-0}"
    exit 1
fi
echo "requeueing the job, to resume from step ${step:-0}"
scontrol requeue "$SLURM_JOB_ID"
exit {{ again }}
{% else %}
exit "$code"
{% endif %}
