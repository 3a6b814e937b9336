// A program outside of the tree: one token through one layer, by the installed library.
#include <attnd.h>
#include <stdio.h>

enum { DIM = 8 };

int main(int argc, char **argv) {
    attnd_client *c = NULL;
    attnd_errinfo info = {0};
    uint32_t model = 0, len = 0;
    uint64_t seq = 0;
    float q[DIM] = {1}, k[DIM] = {2}, v[DIM] = {3, 4, 5}, out[DIM] = {0};
    attnd_model_opts opts = {.name = "installed",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = 1,
                             .q_heads = 1,
                             .kv_heads = 1,
                             .head_dim = DIM,
                             .all = ATTND_LAYER_DEFAULT};
    attnd_attend_args args = {.rows = 1, .new_rows = 1, .q = q, .k = k, .v = v, .out = out};
    if (argc != 2 || attnd_connect(&c, argv[1], NULL, &info) ||
        attnd_model_open(c, &opts, &model, &info) || attnd_seq_create(c, model, &seq, &info)) {
        fprintf(stderr, "%s: %s\n", attnd_strerror(info.code), info.text);
        return 1;
    }
    attnd_step_seq s = {.seq = seq, .new_len = 1};
    args.model = model;
    attnd_err err = attnd_decode(c, &s, 1, 1000, &args, &len, NULL, &info);
    attnd_close(c);
    printf("%g %g %g, %u token\n", (double)out[0], (double)out[1], (double)out[2], len);
    for (int i = 0; i < DIM; i++) { // one key: out is v, but for the rounding of a quotient
        if (out[i] < v[i] - 2e-6F || out[i] > v[i] + 2e-6F) {
            return 1;
        }
    }
    return err || len != 1;
}
