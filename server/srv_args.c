// The command line, and the configuration that follows from it and the file.
#include "server/srv_args.h"

#include <getopt.h>
#include <string.h>

const char *srv_args_usage(void) {
    return "usage: attnd [--listen URL]... [--device DEVICE] [--config FILE] [--set KEY=VALUE]...\n"
           "  --listen URL       ipc://PATH or tcp://HOST:PORT; over server.listen\n"
           "  --device DEVICE    cpu or cuda:N; over compute.device\n"
           "  --config FILE      INI file, see deploy/attnd.conf\n"
           "  --set KEY=VALUE    one key of the file, such as cache.memory=4GiB; over the file\n"
           "  --no-keeper        serve in this process: the cache then does not outlive it\n"
           "  --check-config     read --config's file and flags, say what is wrong, and exit\n"
           "  --dump-config      write the configuration as a file, and exit\n"
           "  --help, --version\n";
}

static attnd_err add_listen(srv_args *args, const char *url, attnd_errinfo *info) {
    if (!url[0]) {
        return attnd_fail(info, ATTND_EINVAL, "listen", "--listen: the URL is empty");
    }
    size_t used = strlen(args->listen);
    size_t room = sizeof(args->listen) - used;
    int bytes = snprintf(args->listen + used, room, "%s%s", used ? " " : "", url);
    if (bytes < 0 || (size_t)bytes >= room) {
        return attnd_fail(info, ATTND_EINVAL, "listen", "the URLs of --listen are too long");
    }
    return ATTND_OK;
}

static attnd_err add_set(srv_args *args, const char *set, attnd_errinfo *info) {
    if (!strchr(set, '=')) {
        return attnd_fail(info, ATTND_EINVAL, "set", "--set %.64s: not SECTION.KEY=VALUE", set);
    }
    if (args->num_sets == SRV_ARGS_MAX_SETS) {
        return attnd_fail(info, ATTND_EINVAL, "set", "more than %d --set", SRV_ARGS_MAX_SETS);
    }
    args->sets[args->num_sets++] = set;
    return ATTND_OK;
}

attnd_err srv_args_parse(srv_args *args, int argc, char **argv, attnd_errinfo *info) {
    static const struct option options[] = {
        {"listen", required_argument, NULL, 'l'}, {"config", required_argument, NULL, 'c'},
        {"set", required_argument, NULL, 's'},    {"device", required_argument, NULL, 'g'},
        {"check-config", no_argument, NULL, 'k'}, {"dump-config", no_argument, NULL, 'd'},
        {"help", no_argument, NULL, 'h'},         {"version", no_argument, NULL, 'v'},
        {"no-keeper", no_argument, NULL, 'n'},    {NULL, 0, NULL, 0},
    };
    memset(args, 0, sizeof(*args));
    attnd_err err = ATTND_OK;
    optind = 1;
    opterr = 0;
    for (int c; !err && (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'l':
            err = add_listen(args, optarg, info);
            break;
        case 'c':
            args->config = optarg;
            break;
        case 'g':
            args->device = optarg;
            break;
        case 's':
            err = add_set(args, optarg, info);
            break;
        case 'n':
            args->no_keeper = true;
            break;
        case 'k':
            args->mode = SRV_ARGS_CHECK_CONFIG;
            break;
        case 'd':
            args->mode = SRV_ARGS_DUMP_CONFIG;
            break;
        case 'h':
            args->mode = SRV_ARGS_HELP;
            break;
        case 'v':
            args->mode = SRV_ARGS_VERSION;
            break;
        default:
            err = attnd_fail(info, ATTND_EINVAL, "", "%.64s: unknown, or its value is missing",
                             argv[optind - 1]);
        }
    }
    if (!err && optind < argc) {
        err = attnd_fail(info, ATTND_EINVAL, "", "%.64s: attnd takes no arguments", argv[optind]);
    }
    return err;
}

static void apply_set(srv_conf *conf, const char *set, srv_conf_errors *errors) {
    char key[2 * SRV_CONF_NAME_BYTES];
    const char *eq = strchr(set, '=');
    attnd_errinfo info;
    if ((size_t)(eq - set) >= sizeof(key)) {
        srv_conf_error(errors, "--set %.64s: the key is too long", set);
        return;
    }
    memcpy(key, set, (size_t)(eq - set));
    key[eq - set] = '\0';
    if (srv_conf_set(conf, key, eq + 1, &info)) {
        srv_conf_error(errors, "--set: %s", info.text);
    }
}

attnd_err srv_args_conf(const srv_args *args, srv_conf *conf, srv_conf_errors *errors) {
    attnd_errinfo info;
    srv_conf_init(conf);
    attnd_err err = args->config ? srv_conf_load(conf, args->config, errors) : ATTND_OK;
    if (args->listen[0] && srv_conf_set(conf, "server.listen", args->listen, &info)) {
        srv_conf_error(errors, "--listen: %s", info.text);
    }
    if (args->device && srv_conf_set(conf, "compute.device", args->device, &info)) {
        srv_conf_error(errors, "--device: %s", info.text);
    }
    for (int i = 0; i < args->num_sets; i++) {
        apply_set(conf, args->sets[i], errors);
    }
    if (!errors->num) { // else values that were refused would be missed here
        srv_conf_check(conf, errors);
    }
    return err ? err : errors->num ? ATTND_EINVAL : ATTND_OK;
}
