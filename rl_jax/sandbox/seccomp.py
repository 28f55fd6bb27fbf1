"""System calls that no program of a sandbox may make, as a seccomp filter in the kernel's form.

Refused with EPERM: what attacks the kernel or other processes rather than computes, and memory that no limit counts
(memfd, System V, message queues). A new user namespace is refused whoever asks; clone3, whose flags a filter cannot
read, is told to be unknown (ENOSYS), so that libc asks clone. Calls of another architecture end the process.

Source: linux/seccomp.h, linux/filter.h; numbers of asm/unistd_64.h and asm-generic/unistd.h.
"""

import platform
import struct

# name -> (x86_64, aarch64)
DENIED: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "personality": (135, 92),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75), "fanotify_init": (300, 262),
    "clock_settime": (227, 112), "settimeofday": (164, 170), "quotactl": (179, 60),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # of x86_64's numbers
CLONE_NEW = 0x7E020000  # CLONE_NEW{NS, CGROUP, UTS, IPC, USER, PID, NET}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; little-endian low half


def is_known(machine: str = "") -> bool:
    return (machine or platform.machine()) in AUDIT_ARCH


def program(machine: str = "") -> bytes:
    """struct sock_filter[]; machine: as platform.machine() says, "" = this one. Raises KeyError for one not known."""
    machine = machine or platform.machine()
    arch = AUDIT_ARCH[machine]
    which = 0 if machine == "x86_64" else 1
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, arch, 1, 0),
        _step(_RETURN, KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_step(_AT_LEAST, X32_BIT, 0, 1), _step(_RETURN, KILL)]
    for numbers in DENIED.values():
        code += [_step(_EQUAL, numbers[which], 0, 1), _step(_RETURN, ERRNO | EPERM)]
    code += [_step(_EQUAL, CLONE3[which], 0, 1), _step(_RETURN, ERRNO | ENOSYS)]
    code += [
        _step(_EQUAL, CLONE[which], 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, CLONE_NEW, 0, 1),
        _step(_RETURN, ERRNO | EPERM),
        _step(_RETURN, ALLOW),
    ]
    return b"".join(code)


def profile() -> dict:
    """The same in the language of container engines, as JSON; names that one does not know, it passes over."""

    def refused(names: list[str], number: int, **more) -> dict:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, **more}

    new = {"index": 0, "value": CLONE_NEW, "op": "SCMP_CMP_MASKED_EQ"}
    flags = [1 << bit for bit in range(32) if CLONE_NEW >> bit & 1]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            refused([*DENIED], EPERM),
            refused(["clone3"], ENOSYS),
            *(refused(["clone"], EPERM, args=[{**new, "value": f, "valueTwo": f}]) for f in flags),
        ],
    }


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
