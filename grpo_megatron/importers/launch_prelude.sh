# Makes bash record the commands of a launch script instead of running them. Bash reads it before the script
# (BASH_ENV). launch_script.py sets these variables:
#   RECORDER_BASH    path of bash
#   RECORDER_PREFIX  first digits of the placeholders
#   RECORDER_FAILS   commands, without their placeholders, that fail at their first call; each between newlines
#   RECORDER_PRINTS  what programs print: placeholder, 1 or nothing
#   RECORDER_CALLS   number of calls of programs after which the script is ended
#   RECORDER_FILES   not empty: files exist, for [ -f FILE ] and the like
#
# A placeholder is a number of 12 digits. It stands for a text that is not known, such as the output of a
# program, and can be recognised in the settings that contain it.
#
# PATH leads nowhere, so bash calls command_not_found_handle, in a new process, for each command that is
# neither a function nor a builtin.

command_not_found_handle() {
    trap - DEBUG
    set +eufx +o pipefail
    local IFS=$' \t\n' input='' next text calls=0 same=0 similar=0
    case $1 in
        tee | cat | wc | grep | egrep | awk | sed | sort | uniq | head | tail | tr | cut | xargs | jq | bc)
            # Read to the end, so that the writer of a pipe is not ended by SIGPIPE.
            [[ $# -eq 1 || $1 != cat ]] && IFS= read -r -N 65536 input
            ;;
    esac
    case $1 in
        basename | dirname | seq | cat | tee) __tool "$@" && exit 0 ;;
    esac
    __inner_script "$@"
    for text in "$@"; do
        __record word "$text"
    done
    __record line "$__line"
    [[ $input == *"$RECORDER_PREFIX"* ]] && __record input "$input"
    text="$*"
    text=${text//"$RECORDER_PREFIX"???????/}
    text=${text//$'\n'/ }
    printf '%s\n' "$text" >> .calls
    while IFS= read -r next; do
        ((calls += 1))
        [[ $next == "$text" ]] && ((same += 1))
        [[ ${next%% *} == "${text%% *}" ]] && ((similar += 1))
    done < .calls
    # A loop up to a placeholder would last until the sandbox ends it.
    ((calls <= RECORDER_CALLS)) || builtin kill -s XCPU "$RECORDER_PID"
    [[ $RECORDER_FAILS == *$'\n'"$text"$'\n'* && $same -eq 1 ]] && exit 1
    case $RECORDER_PRINTS in
        placeholder) __placeholder ;;
        1) echo 1 ;;
    esac
    # A loop ends that waits for a program to fail.
    exit $((similar > 30))
}

__record() {
    # One write for each word: writes to a pipe are not mixed up with those of other processes.
    printf '%s\0' "$BASHPID $1 $2" >&50
}

__placeholder() {
    printf '%s%07d\n' "$RECORDER_PREFIX" "$BASHPID"
}

# Print what a simple text tool prints, or fail if that depends on what is not known. `input` is its stdin.
__tool() {
    local first=1 step=1 name
    [[ $1 == *name && -z ${2-} ]] && return 1
    case $1 in
        basename)
            name=${2%"${2##*[!/]}"}
            name=${name##*/}
            [[ $# -le 3 && $2 != -* && $name != *"$RECORDER_PREFIX"* ]] || return 1
            [[ $name == "${3-}" ]] || name=${name%"${3-}"}
            printf '%s\n' "$name"
            ;;
        dirname)
            name=${2%"${2##*[!/]}"}
            [[ $# -eq 2 && ($name == */* || $name != *"$RECORDER_PREFIX"*) ]] || return 1
            [[ $name == */* ]] || name=./$name
            name=${name%/*}
            printf '%s\n' "${name:-/}"
            ;;
        seq)
            [[ $* =~ ^seq(\ -?[0-9]{1,6}){1,3}$ ]] || return 1
            [[ $# -gt 2 ]] && first=$2
            [[ $# -gt 3 ]] && step=$3
            ((step != 0 && (${!#} - first) / step < 10000)) || return 1
            for ((; step > 0 ? first <= ${!#} : first >= ${!#}; first += step)); do
                printf '%d\n' "$first"
            done
            ;;
        cat)
            for name in "${@:2}"; do
                [[ -f $name ]] || return 1
                IFS= read -r -N 65536 step < "$name"
                input+=$step
            done
            printf '%s' "$input"
            ;;
        tee) printf '%s' "$input" ;;
    esac
}

# Run the script within a command, if there is one: bash -c SCRIPT, bash << EOF, or a file that was written.
__inner_script() {
    local place next script=''
    for ((place = 1; place + 2 <= $#; place++)); do
        next=$((place + 1))
        case ${!place##*/} in
            bash | sh | zsh | srun | ssh)
                if [[ ${!next} =~ ^-[a-z]*c$ ]]; then
                    "$RECORDER_BASH" -c "${@:place+2}"
                    exit
                fi
                ;;
        esac
    done
    case ${1##*/} in
        bash | sh | zsh | sbatch)
            for ((place = 2; place <= $#; place++)); do
                if __written "${!place}"; then
                    "$RECORDER_BASH" "${@:place}"
                    exit
                fi
                [[ ${!place} == [-+]* ]] || return 0
            done
            ;;
        ssh) ;;
        *)
            __written "$1" || return 0
            "$RECORDER_BASH" "$@"
            exit
            ;;
    esac
    IFS= read -r -N 65536 script
    if [[ $script ]]; then
        "$RECORDER_BASH" -c "$script"
        exit
    fi
}

# Tell whether a file is one that the script has written.
__written() {
    [[ -f $1 && ($1 != /* || $1 == /tmp/*) ]]
}

__unknown() {
    __record text "$1"
    __placeholder
}

# Builtins that would act on this machine, or wait

cd() {
    PWD=$(__unknown "cd $* && pwd")
}
pushd() { cd "$@"; }
popd() { cd -; }
pwd() { printf '%s\n' "$PWD"; }
sleep() {
    # A loop that waits for long ends the script.
    ((__sleeps += 1))
    ((__sleeps < 30)) || exit 0
}
kill() { [[ ${1-} != -0 ]]; }
ulimit() { :; }
exec() {
    while [[ ${1-} == -* ]]; do
        [[ $1 == -a ]] && shift
        shift
    done
    (($#)) || return 0
    (command_not_found_handle "$@")
    exit
}
command() {
    while [[ ${1-} == -p ]]; do
        shift
    done
    case ${1-}/$(type -t -- "${1-}") in
        -*/*) (command_not_found_handle command "$@") ;;
        */builtin) builtin "$@" ;;
        *) (command_not_found_handle "$@") ;;
    esac
}
source() {
    if __written "${1-}"; then
        builtin source "$@"
    else
        (__record source "source $*")
    fi
}
function . { source "$@"; }

# Before each command: keep PATH, let a name with a slash be recorded, and drop a redirection to a file that
# cannot be written. Fails if __instead is to run in place of the command.
__before() {
    [[ ${BASH_SOURCE[1]-} == "$BASH_ENV" ]] && return 0
    local -
    set +eufx +o pipefail
    local piece='"[^"]*"|'"'[^']*'"'|\$\([^()]*\)|[^] "'"'"'<>()&;`]'
    local assignment="^[A-Za-z_][A-Za-z_0-9]*\+?=($piece)* +(.*)" word="($piece)+"
    local rest=$1 name
    shopt -s extdebug # not earlier: bash would start a debugger
    __line=${BASH_LINENO[0]}
    PATH=$RECORDER_PATH
    __instead=''
    if [[ $rest =~ ^(\[|\[\[|test)\ (.*\ )?-[defhLrswx]\  ]]; then
        (__record test "$rest")
        [[ -z $RECORDER_FILES || $rest == *!\ -* ]]
        return
    fi
    while [[ ${rest%%[ \"\']*} == *=* && $rest =~ $assignment ]]; do
        rest=${BASH_REMATCH[2]}
    done
    if [[ $rest =~ ^[A-Za-z0-9_./:@%+\"\$\{\}-]+ && ${BASH_REMATCH[0]} == *[/\$]* ]]; then
        eval "name=${BASH_REMATCH[0]}" 2> /dev/null
        if [[ $name =~ ^[A-Za-z0-9_./:@%+-]+$ && $name == */* ]]; then
            eval "function $name { (command_not_found_handle $name \"\$@\"); }"
        fi
    fi
    rest=$1
    if [[ $rest == *\>* && $rest =~ ^(.*)\ ([0-9]*|\&)(\>|\>\>|\>\|)\ ($word)((\ [0-9]*\>\&[0-9-]+)*)$ ]]; then
        eval "name=${BASH_REMATCH[4]}" 2> /dev/null
        : 2> /dev/null >> "$name" || __instead="${BASH_REMATCH[1]}${BASH_REMATCH[6]}"
    fi
    [[ -z $__instead ]]
}

__sleeps=0
__line=0
export RECORDER_PID=${RECORDER_PID:-$$}
PWD=$RECORDER_PWD
PATH=$RECORDER_PATH
set -o functrace
trap '__before "$BASH_COMMAND" || { eval "$__instead"; ! :; }' DEBUG
