"""The system calls that code in a sandbox may make: the one source of both compiled filters.

Called by `sandbox.drivers.seccomp.compile`. What is named nowhere here answers ENOSYS, as a kernel
without it would, so that libraries fall back to what they did before it existed. What programs
probe for, and what only an administrator may use, answers EPERM.
"""

from __future__ import annotations

ALLOWED = frozenset(
    """
    accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown
    clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup
    dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
    eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod
    fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork
    fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait
    futex_waitv futex_wake futimesat get_mempolicy get_robust_list getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid
    getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
    getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr
    lseek lsetxattr lstat madvise membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock
    mlock2 mlockall mmap mprotect mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall
    munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2
    pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 pselect6
    pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg
    remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction
    rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
    semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid
    setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit
    setsid setsockopt setuid setxattr shmat shmctl shmdt shmget shutdown sigaltstack signalfd
    signalfd4 socketpair splice stat statfs statx symlink symlinkat sync sync_file_range syncfs
    sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
    timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
    utime utimensat utimes vfork wait4 waitid write writev
    """.split()
)

FORBIDDEN = frozenset(  # EPERM
    """
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init
    fanotify_mark finit_module fsconfig fsmount fsopen fspick init_module ioperm iopl kcmp
    kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages modify_ldt mount
    mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree
    perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease process_vm_readv
    process_vm_writev ptrace quotactl quotactl_fd reboot request_key set_mempolicy
    set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon syslog
    umount2 unshare userfaultfd vhangup vmsplice
    """.split()
)

ABSENT = frozenset(  # ENOSYS, said here because each has a reason
    """
    clone3 io_uring_enter io_uring_register io_uring_setup
    """.split()
    # clone3 hides its flags behind a pointer that a filter cannot read: libc then uses clone.
    # io_uring does its work outside of any filter.
)

# New namespaces of any kind, through clone's flags: mount, cgroup, uts, ipc, user, pid, net.
NAMESPACE_FLAGS = 0x7E020000

# Address families: unix, inet, inet6. Netlink only for its routing table (protocol 0), which
# answers which interfaces exist.
SOCKET_FAMILIES = (1, 2, 10)
NETLINK_FAMILY = 16
NETLINK_ROUTE = 0

# Terminal requests that put bytes into somebody's input queue: TIOCSTI and TIOCLINUX.
FORBIDDEN_IOCTLS = (0x5412, 0x541C)

# Execution domains: Linux, Linux that says it is 32-bit, and the question what is set. None that
# switches address space randomisation off.
PERSONALITIES = (0x0, 0x0008, 0xFFFFFFFF)

# Rules by argument, one per system call: see `compile` for what each does.
CONDITIONAL = frozenset({"clone", "ioctl", "personality", "socket"})
