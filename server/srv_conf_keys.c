// The table of configuration keys.  Everything else about a key (parsing, limits, dump, reload,
// the reference in deploy/attnd.conf and the test that holds it to this table) follows from its
// row.  Sizes of pools are here because the daemon allocates nothing later.
#include "kvcache/kv_tier_slots.h"
#include "server/srv_conf.h"

#define GIB    (1ull << 30)
#define MIB    (1ull << 20)
#define KIB    (1ull << 10)
#define DAY_MS (24ull * 3600 * 1000)

#define CONF(field)   offsetof(srv_conf, field)
#define TENANT(field) offsetof(srv_conf_tenant, field)

// section, name, type, offset, default, min, max, choices, reloadable, doc
const srv_conf_key srv_conf_keys[] = {
    {"server", "listen", SRV_CONF_TEXT, CONF(listen), "ipc:///run/attnd/attnd.sock", 0, 0, NULL,
     false,
     "URLs to listen on, at most 8, separated by spaces: ipc://PATH and tcp://HOST:PORT.  A path, "
     "with .attach appended, has at most 107 bytes."},
    {"server", "admin", SRV_CONF_TEXT, CONF(admin), "", 0, 0, NULL, false,
     "URL of the administration socket, ipc:// only; empty: the first ipc:// URL of listen with "
     ".admin appended.  Must be set when listen has tcp:// URLs only."},
    {"server", "attach_socket", SRV_CONF_TEXT, CONF(attach_socket), "", 0, 0, NULL, false,
     "Path of the socket that shared-memory rings are attached over; empty: that of the first "
     "ipc:// URL of listen with .attach appended; none: no rings.  A socket handed over by systemd "
     "under the name attach is used instead."},
    {"server", "spin_us", SRV_CONF_COUNT, CONF(spin_us), "50", 0, 100000, NULL, true,
     "Microseconds that rings are polled after the last request or reply before the daemon sleeps; "
     "0: it never polls."},
    {"server", "flag_spin_us", SRV_CONF_COUNT, CONF(flag_spin_us), "2000", 0, 100000, NULL, false,
     "Microseconds that the flags of a region are polled after the last one came, or an attend_all "
     "began; then they are looked at every 50 us, after 100 ms every millisecond; 0: so from the "
     "first.  The end of a layer that runs is polled for so long, too, and a GPU's submit thread "
     "goes on behind it for as long again."},
    {"server", "socket_mode", SRV_CONF_MODE, CONF(socket_mode), "0660", 0, 0777, NULL, false,
     "Permissions of the sockets that clients use."},
    {"server", "admin_mode", SRV_CONF_MODE, CONF(admin_mode), "0600", 0, 0777, NULL, false,
     "Permissions of the administration socket."},
    {"server", "in_process_uids", SRV_CONF_UIDS, CONF(in_process_uids), "", 0, 0, NULL, true,
     "User ids, separated by spaces, whose processes may map the whole arena and attend by "
     "themselves; empty: none.  Such a process can read and destroy what every tenant has cached, "
     "so name users that are trusted with all of it."},
    {"server", "log_level", SRV_CONF_CHOICE, CONF(log_level), "info", 0, 0, "error warn info debug",
     true, "The least severe events that are logged."},
    {"server", "drain_timeout", SRV_CONF_TIME, CONF(drain_timeout_ms), "30s", 0, DAY_MS, NULL, true,
     "How long SIGTERM waits for running work before it is aborted.  Its replies then have 2 s to "
     "be "
     "read; should anything still hang 5 s later, the process ends with exit status 3."},
    {"server", "reattach_timeout", SRV_CONF_TIME, CONF(reattach_timeout_ms), "30s", 0, DAY_MS, NULL,
     false,
     "How long after a restart the sessions of the run before wait for their clients to come back "
     "with their secrets; then they are closed, and what is not kept is freed."},
    {"server", "restart_pause", SRV_CONF_TIME, CONF(restart_pause_ms), "10s", 0, DAY_MS, NULL,
     false,
     "The longest pause before a worker that keeps dying within 10 s is started again; 0: none.  "
     "After three starts in a row whose worker died before it served comes one with an empty "
     "cache, "
     "since what kills them may lie there; after six attnd itself ends, with status 1.  Starts "
     "that find the GPU out of reach (its MPS server ends, its driver is loaded anew, another "
     "process has it or its memory) do not count: they are repeated until one finds it."},

    {"cache", "memory", SRV_CONF_SIZE, CONF(memory_bytes), "1GiB", MIB, 64ull << 40, NULL, false,
     "Size of the arena that KV blocks lie in: at least one slab, and a slab for each size of "
     "block "
     "in use."},
    {"cache", "slab", SRV_CONF_SIZE, CONF(slab_bytes), "32MiB", 64 * KIB, 4 * GIB, NULL, false,
     "Unit in which models of different block size share the arena; a multiple of 256."},
    {"cache", "block_tokens", SRV_CONF_COUNT, CONF(block_tokens), "64", 1, 4096, NULL, false,
     "Tokens a block for models that do not ask for a number."},
    {"cache", "max_blocks", SRV_CONF_COUNT, CONF(max_blocks), "1048576", 1, 1u << 28, NULL, false,
     "Blocks of all sizes together that can be kept track of."},
    {"cache", "max_sequences", SRV_CONF_COUNT, CONF(max_sequences), "4096", 1, 1u << 20, NULL,
     false, "Sequences of all clients."},
    {"cache", "max_seq_blocks", SRV_CONF_COUNT, CONF(max_seq_blocks), "8192", 1, 1u << 24, NULL,
     false, "Longest block table of a sequence in one layer group."},
    {"cache", "max_models", SRV_CONF_COUNT, CONF(max_models), "64", 1, 4096, NULL, false,
     "Models open at once, and those of which only prefixes are cached.  After a restart those of "
     "the run before count for server.reattach_timeout, also when their clients came back and "
     "closed them."},
    {"cache", "prefixes", SRV_CONF_BOOL, CONF(prefixes), "on", 0, 1, NULL, false,
     "Whether full blocks of tokens whose ids clients tell are kept when nobody uses them any "
     "more, "
     "for prompts that begin with the same tokens; they go when blocks are needed."},
    {"cache", "prefix_block_tokens", SRV_CONF_COUNT, CONF(prefix_block_tokens), "64", 1, 4096, NULL,
     false,
     "Largest block, in tokens, that is kept so; token ids of a model with larger ones are "
     "refused. "
     "Four bytes a token are set aside for each block."},
    {"cache", "eviction", SRV_CONF_CHOICE, CONF(eviction), "lru", 0, 0, "lru reuse", false,
     "Which block that nobody uses goes first: lru, the least recently used; reuse, the one least "
     "likely to be used again, by how often and how lately it was, and how far from the beginning "
     "it is."},

    {"tier", "memory", SRV_CONF_SIZE, CONF(tier_memory_bytes), "0", 0, KV_TIER_MAX_BYTES, NULL,
     false,
     "Host memory that cached blocks go to when others need their place in the arena, and come "
     "back "
     "from when a step with a deadline asks for their tokens; 0: none, else at least cache.slab "
     "and "
     "4 KiB."},
    {"tier", "file", SRV_CONF_TEXT, CONF(tier_file), "", 0, 0, NULL, false,
     "File that they go to when there is no such memory, or on to before it is full, on a file "
     "system with O_DIRECT; empty: none.  It is made, and all its space allocated; no other file "
     "is ever overwritten.  Needs "
     "io_uring."},
    {"tier", "file_size", SRV_CONF_SIZE, CONF(tier_file_bytes), "0", 0, KV_TIER_MAX_BYTES, NULL,
     false, "Size of that file; at least cache.slab and 4 KiB."},
    {"tier", "max_blocks", SRV_CONF_COUNT, CONF(tier_max_blocks), "1048576", 1, 1u << 28, NULL,
     false,
     "Blocks in tiers that can be kept track of, those of all layer groups of a model as one."},
    {"tier", "queue", SRV_CONF_COUNT, CONF(tier_queue), "64", 1, 4096, NULL, false,
     "Copies to and from each tier under way at once; steps wait for more."},
    {"tier", "wait", SRV_CONF_TIME, CONF(tier_wait_ms), "1s", 0, DAY_MS, NULL, true,
     "How long a step waits for tiers, within its deadline; then it goes on with what is in the "
     "arena, and cached blocks that are in its way are dropped.  0: it never waits, and tiers are "
     "not used."},

    {"compute", "device", SRV_CONF_TEXT, CONF(device), "cpu", 0, 0, NULL, false,
     "Where attention runs: cpu; or cuda:N, the GPU of that number, whose memory then holds the "
     "arena."},
    {"compute", "staging", SRV_CONF_SIZE, CONF(staging_bytes), "64MiB", MIB, 4 * GIB, NULL, false,
     "Each of the two buffers, pinned and on the GPU, that tensors pass through; a larger launch "
     "runs in several pieces.  The CPU has none."},
    {"compute", "threads", SRV_CONF_COUNT, CONF(threads), "0", 0, 4096, NULL, false,
     "Compute threads of the CPU; 0: the processors of the affinity mask."},
    {"compute", "isa", SRV_CONF_TEXT, CONF(isa), "", 0, 0, NULL, false,
     "Instruction set of the CPU kernels, such as scalar, avx2, avx512, neon; empty: the best "
     "there is."},
    {"compute", "deterministic", SRV_CONF_BOOL, CONF(deterministic), "off", 0, 1, NULL, false,
     "The bits of an output depend on its sequence alone, never on what else runs."},
    {"compute", "prefill_chunk", SRV_CONF_COUNT, CONF(prefill_chunk_tokens), "512", 8, 1u << 20,
     NULL, false, "Query tokens of one chunk of a prefill; a decode waits for at most one."},
    {"compute", "prefill_alone", SRV_CONF_COUNT, CONF(prefill_alone_tokens), "8192", 0, 1u << 20,
     NULL, false,
     "The same on a GPU while there was no decode for 10 ms: as many query tokens over as many "
     "keys, or fewer over more; in service mode in one launch, else in several of prefill_chunk.  "
     "The first decode after such a pause waits for at most that; 0: chunks are never longer."},
    {"compute", "decodes_in_a_row", SRV_CONF_COUNT, CONF(decodes_in_a_row), "8", 1, 1u << 20, NULL,
     false, "Decode launches before a waiting prefill gets a chunk; on a GPU at least 2."},
    {"compute", "launch_rows", SRV_CONF_COUNT, CONF(launch_rows), "4096", 1, 1u << 20, NULL, false,
     "Largest launch, in rows (sequences of one layer); at least limits.step_seqs."},
    {"compute", "inline_work", SRV_CONF_COUNT, CONF(inline_work), "65536", 0, 1u << 30, NULL, false,
     "Multiply-adds of a launch up to which the CPU runs it on the loop's thread, since waking the "
     "compute threads takes longer; 0: none does."},
    {"compute", "launch_ahead", SRV_CONF_CHOICE, CONF(launch_ahead), "auto", 0, 0, "auto on off",
     false,
     "Whether a GPU's submit thread starts the next layer of an attend_all by itself when its flag "
     "comes, if no other client's is at work, instead of being told: it polls for that for "
     "server.flag_spin_us; auto: on machines of more than two processors."},
    {"compute", "wait_kernels", SRV_CONF_CHOICE, CONF(wait_kernels), "auto", 0, 0, "auto off",
     false,
     "Whether a client that shares the GPU with the daemon through MPS waits for each layer in a "
     "small kernel instead of by a memory operation, and the daemon, where compute.launch_ahead is "
     "in force, for the next layer's flag, 50 us at most.  That is faster.  But under MPS whoever "
     "is killed inside a kernel ends the contexts of all, and this makes the wait a kernel.  auto: "
     "where both are under one MPS, for six clients at most; others wait by a memory operation."},

    {"limits", "message", SRV_CONF_SIZE, CONF(message_bytes), "64MiB", 64 * KIB, 256 * MIB, NULL,
     false, "Largest message; a longer one closes its connection."},
    {"limits", "connection_memory", SRV_CONF_SIZE, CONF(connection_bytes), "256MiB", 64 * KIB,
     64 * GIB, NULL, false,
     "Bytes of requests and unread replies of one connection; above it requests are refused.  At "
     "least twice limits.message."},
    {"limits", "connections", SRV_CONF_COUNT, CONF(connections), "128", 1, 4096, NULL, false,
     "Clients connected at once; further ones are closed at once.  A peer that never finishes the "
     "transport's greeting is none yet: it takes a descriptor until the transport closes it, after "
     "10 s.  So the daemon raises its limit of open files to the hard one at start."},
    {"limits", "in_flight", SRV_CONF_COUNT, CONF(in_flight), "64", 1, 1024, NULL, false,
     "Requests of one connection without a reply; above it requests are refused, and with twice as "
     "many unread replies the connection is closed."},
    {"limits", "rings", SRV_CONF_COUNT, CONF(rings), "128", 1, 4096, NULL, false,
     "Connections of the attach socket at once; further ones are closed at once."},
    {"limits", "ring_memory", SRV_CONF_SIZE, CONF(ring_bytes), "256MiB", 64 * KIB, 64 * GIB, NULL,
     false, "Largest shared memory of one ring, its queues included."},
    {"limits", "all_rings_memory", SRV_CONF_SIZE, CONF(all_rings_bytes), "4GiB", 64 * KIB,
     64ull << 40, NULL, false,
     "Shared memory of all rings together, at least that of one; above it rings are refused."},
    {"limits", "region_memory", SRV_CONF_SIZE, CONF(region_bytes), "256MiB", 0, 1024 * GIB, NULL,
     false,
     "Largest region of a client, memory of the GPU that it shares with the daemon; 0: none is "
     "given."},
    {"limits", "all_regions_memory", SRV_CONF_SIZE, CONF(all_regions_bytes), "1GiB", 0, 64ull << 40,
     NULL, false,
     "Regions of all clients together, at least that of one; above it regions are refused.  It "
     "comes out of the GPU's memory beside cache.memory, as it is asked for.  One counts until "
     "its client says that it keeps no descriptor of it, or its process is gone; what another "
     "process "
     "was handed is not known."},
    {"limits", "send_timeout", SRV_CONF_TIME, CONF(send_timeout_ms), "10s", 10, DAY_MS, NULL, true,
     "How long a reply may wait for its client to read; then the connection is closed."},
    {"limits", "hello_timeout", SRV_CONF_TIME, CONF(hello_timeout_ms), "10s", 10, DAY_MS, NULL,
     true, "How long a connection may stay without a session."},
    {"limits", "steps", SRV_CONF_COUNT, CONF(steps), "256", 1, 65536, NULL, false,
     "Steps open or waiting for blocks at once, all clients."},
    {"limits", "session_steps", SRV_CONF_COUNT, CONF(session_steps), "128", 1, 65536, NULL, false,
     "Steps of one client, open or waiting for blocks, at once."},
    {"limits", "session_sequences", SRV_CONF_COUNT, CONF(session_sequences), "2048", 1, 1u << 20,
     NULL, false, "Sequences that one client holds."},
    {"limits", "step_seqs", SRV_CONF_COUNT, CONF(step_seqs), "1024", 1, 1024, NULL, false,
     "Sequences of one step."},
    {"limits", "step_rows", SRV_CONF_COUNT, CONF(step_rows), "65536", 1, 65536, NULL, false,
     "Query rows of one step, all its sequences."},
    {"limits", "step_memory", SRV_CONF_SIZE, CONF(step_bytes), "1MiB", KIB, GIB, NULL, false,
     "Memory of one step for its token ids, positions, tree and block masks and moves of accepted "
     "rows."},
    {"limits", "queue", SRV_CONF_COUNT, CONF(queue), "4096", 1, 1u << 20, NULL, false,
     "Attends that wait for the compute threads, all clients."},
    {"limits", "tenant_queue", SRV_CONF_COUNT, CONF(tenant_queue), "2048", 1, 1u << 20, NULL, false,
     "Attends of one tenant that wait for the compute threads."},

    {"tenant", "uids", SRV_CONF_UIDS, TENANT(uids), "", 0, 0, NULL, true,
     "User ids that may be this tenant, separated by spaces; empty: every user."},
    {"tenant", "quota_blocks", SRV_CONF_COUNT, TENANT(quota_blocks), "0", 0, 1u << 28, NULL, true,
     "Blocks that the tenant may have, of any size, in use by its sequences or cached; 0: no "
     "quota."},
    {"tenant", "floor_blocks", SRV_CONF_COUNT, TENANT(floor_blocks), "0", 0, 1u << 28, NULL, true,
     "Blocks, in use or cached, that the others leave the tenant of what it has when they need "
     "some; "
     "0: none."},
    {"tenant", "cache_priority", SRV_CONF_COUNT, TENANT(cache_priority), "100", 0, 255, NULL, true,
     "Of what the tenant caches from then on: cached blocks of a lower one go first.  A sequence "
     "may "
     "ask for a lower one."},
    {"tenant", "share", SRV_CONF_COUNT, TENANT(share), "1", 1, 1000, NULL, true,
     "Weight of the tenant when the compute threads are fought for."},
    {NULL, NULL, SRV_CONF_TEXT, 0, NULL, 0, 0, NULL, false, NULL},
};

const size_t srv_conf_num_keys = sizeof(srv_conf_keys) / sizeof(srv_conf_keys[0]) - 1;
